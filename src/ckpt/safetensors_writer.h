// Writes safetensors files from host memory: the header first, since names and shapes are known in advance, then the
// tensors as a stream. 8 + N is padded with spaces to a multiple of 4096, so that data begin on a page.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/file.h"
#include "core/hash.h"
#include "core/view.h"

namespace tessera::ckpt {

struct TensorSpec {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
};

struct TensorRef {
  std::string name;
  View view;  // host memory, any row stride
};

TensorSpec spec_of(const TensorRef& ref);
std::string_view stored_name(DType dtype);  // "F32" ...

class SafetensorsWriter {
 public:
  static constexpr int64_t kHeaderAlignment = 4096;

  // Creates the file and writes the header. Specs stand with the widest types first, so that every tensor is aligned to
  // its element (readers that map the file rely on it); names are unique.
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> specs,
                    const std::map<std::string, std::string>& metadata);

  struct Written {
    int64_t offset;
    int64_t bytes;
    std::string hash;
  };
  Written append(const View& view);  // the next tensor in the order of the specs, of that type and shape
  int64_t finish();                  // all are there: to the disk, closed; returns the size of the file

  int64_t header_bytes() const { return header_bytes_; }
  const std::string& header_hash() const { return header_hash_; }

 private:
  FileWriter file_;
  std::vector<TensorSpec> specs_;
  size_t next_ = 0;
  int64_t header_bytes_ = 0;
  std::string header_hash_;
};

// A whole file in one call: written beside `path`, then renamed over it, so that a reader never sees half a file.
void write_safetensors(const std::string& path, std::span<const TensorRef> tensors,
                       const std::map<std::string, std::string>& metadata = {});

void order_widest_first(std::vector<TensorRef>& tensors);  // otherwise the order stays

}  // namespace tessera::ckpt
