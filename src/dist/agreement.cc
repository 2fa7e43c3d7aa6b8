#include "dist/agreement.h"

#include <algorithm>

#include "core/file.h"
#include "core/hash.h"
#include "dist/ranks.h"

namespace tessera::dist {
namespace {

constexpr const char* kNotSet = "not set";

// Fields with their lengths before them: "5:model3:abc".
std::string encode(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) {
    for (const std::string& field : {name, value}) text += fmt::format("{}:{}", field.size(), field);
  }
  return text;
}

Facts decode(const std::string& text) {
  size_t at = 0;
  const auto field = [&] {
    const size_t colon = text.find(':', at);
    const size_t length = std::stoul(text.substr(at, colon - at));
    at = colon + 1 + length;
    return text.substr(colon + 1, length);
  };
  Facts facts;
  while (at < text.size()) {
    const std::string name = field();
    facts.emplace_back(name, field());
  }
  return facts;
}

std::string value_of(const Facts& facts, const std::string& name) {
  const auto found = std::ranges::find(facts, name, &Facts::value_type::first);
  return found == facts.end() ? kNotSet : found->second;
}

// "\n  train.steps: 300 on ranks 0, 2; 200 on rank 1"; "" where all have the same.
std::string difference(const std::string& name, const std::vector<Facts>& all) {
  std::vector<std::pair<std::string, std::vector<int>>> holders;  // of each value, by their lowest rank
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string value = value_of(all[rank], name);
    auto holder = std::ranges::find(holders, value, &std::pair<std::string, std::vector<int>>::first);
    if (holder == holders.end()) holder = holders.insert(holder, {value, {}});
    holder->second.push_back(static_cast<int>(rank));
  }
  if (holders.size() == 1) return "";
  std::vector<std::string> parts;
  for (const auto& [value, ranks] : holders) parts.push_back(fmt::format("{} on {}", value, name_ranks(ranks)));
  return fmt::format("\n  {}: {}", name, fmt::join(parts, "; "));
}

}  // namespace

void require_same(Communicator& world, const Facts& facts) {
  const std::string own = encode(facts);
  const std::vector<int64_t> hashes = world.all_gather(static_cast<int64_t>(hash_of(own).low));
  if (std::ranges::count(hashes, hashes.front()) == std::ssize(hashes)) return;
  std::vector<Facts> all;
  for (const std::string& text : world.all_gather(own)) all.push_back(decode(text));
  std::vector<std::string> names;
  for (const Facts& of_rank : all) {
    for (const auto& [name, value] : of_rank) {
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
  }
  std::string differences;
  for (const std::string& name : names) differences += difference(name, all);
  if (differences.empty()) return;  // the same, in another order
  fail_user(
      "the processes of this job were not given the same:{}\nstart all of them with one binary, run file and data",
      differences);
}

std::string hash_of_binary() { return hash_hex(MappedFile("/proc/self/exe").text()); }

}  // namespace tessera::dist
