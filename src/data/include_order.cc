#include "data/include_order.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <unordered_map>

namespace tessera::data {
namespace {

std::string_view trimmed_front(std::string_view text) {
  const size_t at = text.find_first_not_of(" \t");
  return at == std::string_view::npos ? std::string_view() : text.substr(at);
}

// The name in `#include "name"`, empty when the line is something else.
std::string_view included_name(std::string_view line) {
  line = trimmed_front(line);
  if (line.empty() || line[0] != '#') return {};
  line = trimmed_front(line.substr(1));
  if (!line.starts_with("include")) return {};
  line = trimmed_front(line.substr(7));
  if (line.empty() || line[0] != '"') return {};
  const size_t end = line.find('"', 1);
  return end == std::string_view::npos ? std::string_view() : line.substr(1, end - 1);
}

// directory + "/" + name with "." and ".." taken out; empty when it leaves the tree.
std::string joined(std::string_view directory, std::string_view name) {
  std::vector<std::string_view> parts;
  for (std::string_view rest : {directory, name}) {
    while (!rest.empty()) {
      const size_t end = std::min(rest.find('/'), rest.size());
      const std::string_view part = rest.substr(0, end);
      rest.remove_prefix(std::min(end + 1, rest.size()));
      if (part == "..") {
        if (parts.empty()) return {};
        parts.pop_back();
      } else if (!part.empty() && part != ".") {
        parts.push_back(part);
      }
    }
  }
  std::string path;
  for (const std::string_view part : parts) {
    if (!path.empty()) path += '/';
    path += part;
  }
  return path;
}

using PathIndex = std::unordered_map<std::string_view, int64_t>;

int64_t resolve(const PathIndex& paths, std::string_view includer, std::string_view name) {
  std::string_view directory = includer;
  while (!directory.empty()) {
    const size_t slash = directory.rfind('/');
    directory = slash == std::string_view::npos ? std::string_view() : directory.substr(0, slash);
    const auto found = paths.find(joined(directory, name));
    if (found != paths.end()) return found->second;
  }
  return -1;
}

// Tarjan's strongly connected components without recursion: include chains can be as long as the tree has files.
class Components {
 public:
  explicit Components(const std::vector<std::vector<int64_t>>& edges)
      : edges_(edges), visit_(edges.size(), -1), low_(edges.size(), 0), component_(edges.size(), -1) {
    for (size_t i = 0; i < edges.size(); ++i) {
      if (visit_[i] < 0) explore(static_cast<int64_t>(i));
    }
  }

  int64_t count() const { return count_; }
  int64_t of(int64_t i) const { return component_[static_cast<size_t>(i)]; }

 private:
  struct Frame {
    size_t node, next_edge;
  };

  void enter(size_t node) {
    visit_[node] = low_[node] = clock_++;
    open_.push_back(node);
    frames_.push_back({node, 0});
  }

  void explore(int64_t root) {
    enter(static_cast<size_t>(root));
    while (!frames_.empty()) {
      Frame& frame = frames_.back();
      const size_t node = frame.node;
      if (frame.next_edge < edges_[node].size()) {
        const size_t to = static_cast<size_t>(edges_[node][frame.next_edge++]);
        if (visit_[to] < 0) {
          enter(to);
        } else if (component_[to] < 0) {
          low_[node] = std::min(low_[node], visit_[to]);
        }
        continue;
      }
      if (low_[node] == visit_[node]) close(node);
      frames_.pop_back();
      if (!frames_.empty()) low_[frames_.back().node] = std::min(low_[frames_.back().node], low_[node]);
    }
  }

  void close(size_t root) {
    size_t node;
    do {
      node = open_.back();
      open_.pop_back();
      component_[node] = count_;
    } while (node != root);
    ++count_;
  }

  const std::vector<std::vector<int64_t>>& edges_;
  std::vector<int64_t> visit_, low_, component_;
  std::vector<size_t> open_;
  std::vector<Frame> frames_;
  int64_t clock_ = 0, count_ = 0;
};

}  // namespace

std::vector<std::vector<int64_t>> include_graph(const std::vector<SourceFile>& files) {
  PathIndex paths;
  for (size_t i = 0; i < files.size(); ++i) paths.emplace(files[i].path, static_cast<int64_t>(i));
  std::vector<std::vector<int64_t>> edges(files.size());
  for (size_t i = 0; i < files.size(); ++i) {
    std::string_view rest = files[i].content;
    while (!rest.empty()) {
      const size_t end = std::min(rest.find('\n'), rest.size());
      const std::string_view name = included_name(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
      const int64_t target = name.empty() ? -1 : resolve(paths, files[i].path, name);
      if (target >= 0 && target != static_cast<int64_t>(i)) edges[i].push_back(target);
    }
    std::sort(edges[i].begin(), edges[i].end());
    edges[i].erase(std::unique(edges[i].begin(), edges[i].end()), edges[i].end());
  }
  return edges;
}

std::vector<int64_t> dependencies_first(const std::vector<std::vector<int64_t>>& edges) {
  const Components components(edges);
  const size_t count = static_cast<size_t>(components.count());
  std::vector<std::vector<int64_t>> members(count), users(count);
  std::vector<int64_t> waiting(count, 0);
  for (size_t i = 0; i < edges.size(); ++i) {
    const int64_t user = components.of(static_cast<int64_t>(i));
    members[static_cast<size_t>(user)].push_back(static_cast<int64_t>(i));
    for (const int64_t to : edges[i]) {
      if (components.of(to) == user) continue;
      users[static_cast<size_t>(components.of(to))].push_back(user);
      ++waiting[static_cast<size_t>(user)];
    }
  }
  using Ready = std::pair<int64_t, size_t>;  // smallest member, component
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready;
  for (size_t c = 0; c < count; ++c) {
    if (waiting[c] == 0) ready.emplace(members[c].front(), c);
  }
  std::vector<int64_t> order;
  while (!ready.empty()) {
    const size_t c = ready.top().second;
    ready.pop();
    order.insert(order.end(), members[c].begin(), members[c].end());
    for (const int64_t user : users[c]) {
      const size_t u = static_cast<size_t>(user);
      if (--waiting[u] == 0) ready.emplace(members[u].front(), u);
    }
  }
  return order;
}

}  // namespace tessera::data
