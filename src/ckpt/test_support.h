// What the tests of this directory share: a scratch directory, tensors whose contents follow from the step, damage.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/checkpoint.h"
#include "core/philox.h"

namespace tessera::ckpt::test {

class TempDir {
 public:
  TempDir() {
    // In memory where that exists: these tests sync thousands of times, and none can lose power.
    const std::filesystem::path memory = "/dev/shm";
    const auto base = ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
    std::string pattern = (base / "tessera-ckpt-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw Error("mkdtemp failed");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string operator/(const std::string& name) const { return (std::filesystem::path(path_) / name).string(); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Tensors with their storage.
class Tensors {
 public:
  void add(const std::string& name, DType dtype, Shape shape) {
    storage_.emplace_back(static_cast<size_t>(shape.elements() * bytes_of(dtype)));
    refs_.push_back({name, View(storage_.back().data(), dtype, shape)});
  }
  void fill(uint64_t seed) {
    for (size_t t = 0; t < storage_.size(); ++t) {
      const Philox random(seed, Purpose::test, t);
      for (size_t i = 0; i < storage_[t].size(); ++i) {
        storage_[t][i] = static_cast<std::byte>(random.block(i / 16)[i / 4 % 4] >> (i % 4 * 8));
      }
    }
  }
  const std::vector<TensorRef>& refs() const { return refs_; }
  const std::vector<std::vector<std::byte>>& storage() const { return storage_; }

 private:
  std::vector<std::vector<std::byte>> storage_;
  std::vector<TensorRef> refs_;
};

// Every type, an empty tensor, a scalar, odd sizes; about 20 KiB.
inline Tensors sample_tensors(uint64_t seed) {
  Tensors t;
  t.add("layers.0.moe.experts.3.w_gate", DType::f32, {31, 33});
  t.add("embedding", DType::f32, {64, 48});
  t.add("empty", DType::f32, {0, 7});
  t.add("scale", DType::f64, Shape{});
  t.add("optimizer.v", DType::f64, {5, 3});
  t.add("counts", DType::i64, {9});
  t.add("ids", DType::i32, {3, 1, 2});
  t.add("bytes", DType::u8, {13});
  t.add("norm", DType::bf16, {11});
  t.fill(seed);
  return t;
}

inline CheckpointState sample_state(int64_t step, const Tensors& tensors) {
  CheckpointState state;
  state.step = step;
  state.run_id = "nano-7";
  state.attempt = 2;
  state.model_fingerprint = "model-a1";
  state.tokenizer_fingerprint = "bytes-1";
  state.state_json = R"({"rng":{"seed":18446744073709551615},"loader":{"file":3,"epoch":0.25},"stage":"warm"})";
  state.tensors = tensors.refs();
  return state;
}

// Tensors of seed `step` unless another is given.
inline SaveReport save_sample(const std::string& root, int64_t step, const SaveOptions& options = {},
                              int64_t seed = -1) {
  const Tensors tensors = sample_tensors(static_cast<uint64_t>(seed < 0 ? step : seed));
  return save(root, sample_state(step, tensors), options);
}

// Whether the checkpoint holds exactly the sample of this seed.
inline bool holds_sample(const std::string& path, int64_t seed) {
  const Tensors wanted = sample_tensors(static_cast<uint64_t>(seed));
  const Tensors loaded = sample_tensors(~uint64_t{0});
  load_all(open(path), loaded.refs());
  return wanted.storage() == loaded.storage();
}

inline std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}
inline void spill(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// The message of the UserError that f must throw.
inline std::string user_error(const std::function<void()>& f) {
  try {
    f();
  } catch (const UserError& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "no UserError but: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

#define EXPECT_USER_ERROR(statement, part)                                                              \
  do {                                                                                                  \
    const std::string message_ = ::tessera::ckpt::test::user_error([&] { statement; });                 \
    EXPECT_NE(message_.find(part), std::string::npos) << "found: " << message_ << "\nwanted: " << part; \
  } while (false)

// Runs f in a forked process and returns its wait status.
inline int run_in_child(const std::function<int()>& f) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    int code = 99;
    try {
      code = f();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

}  // namespace tessera::ckpt::test
