// What the tests of this directory share: scratch directories, files, and stores of documents of given lengths.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/store.h"
#include "data/store_writer.h"
#include "data/tokenizer.h"

namespace tessera::data {

class ScratchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera-data-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::string path(const std::string& name) const { return root_ + "/" + name; }

  std::string write(const std::string& name, const std::string& content) const {
    const std::filesystem::path file = path(name);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << content;
    return file.string();
  }

  // Document d holds ids (d * 7 + i) % 256 and ends with EOS; `lengths` count the EOS.
  Store make_store(const std::string& name, const std::vector<int64_t>& lengths, int64_t shard_bytes = 1 << 20) const {
    const auto tokenizer = make_byte_tokenizer();
    StoreWriter writer(path(name), *tokenizer, shard_bytes);
    for (size_t d = 0; d < lengths.size(); ++d) {
      std::vector<int32_t> ids;
      for (int64_t i = 0; i + 1 < lengths[d]; ++i) ids.push_back(static_cast<int32_t>((int64_t(d) * 7 + i) % 256));
      ids.push_back(tokenizer->eos_id());
      writer.add(ids, hash_of(std::to_string(d)), lengths[d] - 1, 0);
    }
    writer.finish();
    return Store(path(name));
  }

  std::string root_;
};

// Runs f and returns the message of the UserError that it must throw.
template <class F>
std::string user_error(F&& f) {
  try {
    f();
  } catch (const UserError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no UserError was thrown";
  return {};
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

}  // namespace tessera::data
