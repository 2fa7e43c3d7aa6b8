#include "dist/mesh.h"

#include <fmt/format.h>

#include <cstdlib>

#include "config/options.h"

namespace tessera::dist {

void Layout::bind(config::Options& o) {
  const config::Range count = {.min = 1};
  o.add("parallel.data", &data, "processes that see different sequences", count);
  o.add("parallel.expert", &expert, "processes that hold different experts; divides data * context", count);
  o.add("parallel.context", &context, "processes that hold neighbouring parts of the same sequences", count);
  o.add("parallel.pipeline", &pipeline, "processes that hold consecutive layers, and work on micro-batches in turn",
        count);
  o.add("parallel.pipeline_chunks", &pipeline_chunks,
        "runs of layers that each of them has: more wait less, hold more micro-batches and send more", count);
  o.add("parallel.tensor", &tensor, "processes that hold different heads and hidden units of every layer", count);
}

void Layout::check(const std::string& where) const {
  if (replicas() % expert == 0) return;
  int64_t nearest = 1;
  for (int64_t e = 1; e <= replicas(); ++e) {
    if (replicas() % e == 0 && std::abs(e - expert) < std::abs(nearest - expert)) nearest = e;
  }
  fail_user("{}: parallel.expert = {} does not divide data * context = {}; the nearest that does is {}", where, expert,
            replicas(), nearest);
}

std::string Layout::to_string() const {
  std::string text;
  for (const auto& [name, value] : {std::pair{"data", data},
                                    {"expert", expert},
                                    {"context", context},
                                    {"pipeline", pipeline},
                                    {"tensor", tensor}}) {
    if (value > 1) text += fmt::format("{}{} {}", text.empty() ? "" : " x ", name, value);
  }
  return text.empty() ? "one process" : text;
}

namespace {

struct Place {
  int64_t stage, data, context, tensor;
};

Place place_of(const Layout& l, int64_t rank) {
  return {rank / (l.tensor * l.context * l.data), rank / (l.tensor * l.context) % l.data, rank / l.tensor % l.context,
          rank % l.tensor};
}
int64_t replica_index(const Layout& l, const Place& p) { return p.data * l.context + p.context; }

// The ranks that `same` finds in one group with this process.
template <class F>
Communicator group(const char* axis, int channel, const Layout& l, Transport& host, Transport* gpu, F&& same) {
  const Place self = place_of(l, host.rank());
  std::vector<int> members;
  for (int rank = 0; rank < host.size(); ++rank) {
    if (same(self, place_of(l, rank))) members.push_back(rank);
  }
  return {axis, std::move(members), channel, host, gpu};
}

const Layout& checked(const Layout& layout, int processes) {
  if (layout.processes() == processes) return layout;
  const int64_t others = layout.processes() / layout.data;
  fail_user("{} processes were started and [parallel] is for {} ({}); {} as many as it asks for", processes,
            layout.processes(), layout.to_string(),
            processes % others == 0 ? fmt::format("set parallel.data = {}, or start", processes / others) : "start");
}

}  // namespace

Mesh::Mesh(const Layout& l, Transport& host, Transport* gpu)
    : layout(checked(l, host.size())),
      data_index(place_of(l, host.rank()).data),
      world(group("world", 0, l, host, gpu, [](const Place&, const Place&) { return true; })),
      replica(group("replica", 1, l, host, gpu,
                    [](const Place& a, const Place& b) { return a.stage == b.stage && a.tensor == b.tensor; })),
      expert(group("expert", 2, l, host, gpu,
                   [&](const Place& a, const Place& b) {
                     return a.stage == b.stage && a.tensor == b.tensor &&
                            replica_index(l, a) / l.expert == replica_index(l, b) / l.expert;
                   })),
      expert_replica(group("expert replica", 3, l, host, gpu,
                           [&](const Place& a, const Place& b) {
                             return a.stage == b.stage && a.tensor == b.tensor &&
                                    replica_index(l, a) % l.expert == replica_index(l, b) % l.expert;
                           })),
      context(group("context", 4, l, host, gpu,
                    [](const Place& a, const Place& b) {
                      return a.stage == b.stage && a.tensor == b.tensor && a.data == b.data;
                    })),
      pipeline(group("pipeline", 5, l, host, gpu,
                     [](const Place& a, const Place& b) {
                       return a.tensor == b.tensor && a.data == b.data && a.context == b.context;
                     })),
      tensor(group("tensor", 6, l, host, gpu, [](const Place& a, const Place& b) {
        return a.stage == b.stage && a.data == b.data && a.context == b.context;
      })) {}

DryMesh::DryMesh(const Mesh* like) {
  if (like == nullptr) return;
  const Communicator& world = like->world;
  std::vector<int> nodes;
  for (int r = 0; r < world.size(); ++r) nodes.push_back(world.node_of(r));
  make(like->layout, world.rank(), std::move(nodes));
}

DryMesh::DryMesh(const Layout& layout, int rank, int64_t ranks_per_node) {
  if (layout.processes() == 1) return;
  std::vector<int> nodes;
  for (int64_t r = 0; r < layout.processes(); ++r) {
    nodes.push_back(static_cast<int>(ranks_per_node > 0 ? r / ranks_per_node : 0));
  }
  make(layout, rank, std::move(nodes));
}

void DryMesh::make(const Layout& layout, int rank, std::vector<int> node_of_rank) {
  transport_ = std::make_unique<DryTransport>(rank, std::move(node_of_rank));
  mesh_ = std::make_unique<Mesh>(layout, *transport_);
}

std::vector<const Communicator*> Mesh::axes() const {
  return {&world, &replica, &expert, &expert_replica, &context, &pipeline, &tensor};
}

}  // namespace tessera::dist
