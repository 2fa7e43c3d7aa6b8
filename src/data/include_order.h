// Order of the files of one source tree for reading it as one document: what is included comes before who includes it.
//
// Edges are #include "..." lines that resolve inside the tree, looked up from the includer's directory upwards to the
// root. Strongly connected files count as one; among what may come next, the smallest path goes first.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

struct SourceFile {
  std::string path;  // from the root of the tree, '/' between parts
  std::string content;
};

// For each file the files it includes, as sorted indices without repeats. `files` are sorted by path.
std::vector<std::vector<int64_t>> include_graph(const std::vector<SourceFile>& files);

// Indices in reading order. edges[i]: what must come before i. Ties and cycles by index.
std::vector<int64_t> dependencies_first(const std::vector<std::vector<int64_t>>& edges);

}  // namespace tessera::data
