// Ranks in messages for people: "rank 3", "ranks 0-2, 5".
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

namespace tessera::dist {

inline std::string name_ranks(const std::vector<int>& ascending) {
  std::string text = ascending.size() == 1 ? "rank " : "ranks ";
  for (size_t begin = 0; begin < ascending.size();) {
    size_t end = begin + 1;
    while (end < ascending.size() && ascending[end] == ascending[end - 1] + 1) ++end;
    text += begin == 0 ? "" : ", ";
    text += end - begin == 1 ? fmt::to_string(ascending[begin])
                             : fmt::format("{}-{}", ascending[begin], ascending[end - 1]);
    begin = end;
  }
  return text;
}

}  // namespace tessera::dist
