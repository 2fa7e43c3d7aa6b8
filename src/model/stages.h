// How the layers of a model are shared out in a pipeline: P V chunks of consecutive layers, chunk c in process c mod P.
//
// The first chunk has the embedding, the last one the norm and the head. Where layers do not divide evenly the earlier
// chunks have one more: the head is work of the last one.
#pragma once

#include <cstdint>

namespace tessera::model {

struct Stages {
  int64_t layers = 0;
  int64_t processes = 1;  // P
  int64_t chunks = 1;     // V, of each process

  int64_t count() const { return processes * chunks; }
  int64_t begin(int64_t chunk) const { return (layers * chunk + count() - 1) / count(); }  // its first layer
  int64_t end(int64_t chunk) const { return begin(chunk + 1); }
  int64_t process_of(int64_t chunk) const { return chunk % processes; }
  int64_t chunk_of(int64_t layer) const {
    int64_t chunk = 0;
    while (layer >= end(chunk)) ++chunk;
    return chunk;
  }
};

}  // namespace tessera::model
