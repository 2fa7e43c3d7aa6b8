// Whole bytes or a message that says what to do: full disk, size limit, missing rights, wrong paths, wrong kinds.
#include "core/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>

#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tessera-file-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root = pattern;
  }
  void TearDown() override { fs::remove_all(root); }
  std::string path(const std::string& name) const { return root + "/" + name; }
  int64_t names() const { return std::distance(fs::directory_iterator(root), fs::directory_iterator()); }

  std::string root;
};

void expect_user_error(const std::function<void()>& f, const std::string& found, const std::string& wanted) {
  try {
    f();
    ADD_FAILURE() << "no error; wanted: " << found;
  } catch (const UserError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find(found), std::string::npos) << message;
    EXPECT_NE(message.find(wanted), std::string::npos) << message;
  }
}

TEST_F(FileTest, ReadsAndMapsWhatTheStreamWrote) {
  // Pieces below, at and above what is gathered and what is written at once.
  std::string all;
  FileWriter writer(path("stream"));
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, FileWriter::kPieceBytes / 4 - 1, FileWriter::kPieceBytes / 4,
                              int64_t{7}, FileWriter::kPieceBytes + 3, int64_t{5}}) {
    const std::string piece(static_cast<size_t>(bytes), static_cast<char>('a' + bytes % 26));
    writer.write(piece);
    all += piece;
    EXPECT_EQ(writer.size(), static_cast<int64_t>(all.size()));
  }
  for (int i = 0; i < 5000; ++i) {  // small ones past the end of the buffer
    writer.write(std::string(1000, static_cast<char>(i)));
    all += std::string(1000, static_cast<char>(i));
  }
  writer.close();
  EXPECT_TRUE(read_file(path("stream")) == all);
  MappedFile first(path("stream"));
  const MappedFile mapped(std::move(first));
  EXPECT_EQ(mapped.size(), static_cast<int64_t>(all.size()));
  EXPECT_TRUE(mapped.text() == all);
}

TEST_F(FileTest, EmptyFiles) {
  write_file_synced(path("empty"), "");
  EXPECT_EQ(read_file(path("empty")), "");
  EXPECT_EQ(MappedFile(path("empty")).text(), "");
  EXPECT_EQ(MappedFile().size(), 0);
}

TEST_F(FileTest, AtomicWriteReplacesAllOrNothing) {
  write_file_atomic(path("a"), "first");
  write_file_synced(path("a.tmp"), "left by a killed process");
  write_file_atomic(path("a"), "second");
  EXPECT_EQ(read_file(path("a")), "second");
  EXPECT_EQ(names(), 1);
  fs::create_directory(path("directory"));  // the rename fails, after all is written
  expect_user_error([&] { write_file_atomic(path("directory"), "x"); }, "directory", "check the path");
  EXPECT_EQ(names(), 2);
  const fs::path before = fs::current_path();
  fs::current_path(root);
  write_file_atomic("plain", "no directory in the name");
  fs::current_path(before);
  EXPECT_EQ(read_file(path("plain")), "no directory in the name");
}

TEST_F(FileTest, FullDiskAndSizeLimit) {
  expect_user_error([] { write_file_synced("/dev/full", "x"); }, "disk full: cannot write /dev/full", "free space");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{8192, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_user_error([&] { write_file_atomic(path("large"), std::string(9000, 'x')); }, "file too large", "ulimit -f");
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(names(), 0);
}

TEST_F(FileTest, MissingRights) {
  write_file_synced(path("secret"), "x");
  fs::permissions(path("secret"), fs::perms::none);
  fs::create_directory(path("locked"));
  fs::permissions(path("locked"), fs::perms(0555));
  fs::permissions(root, fs::perms(0755));
  const bool is_root = geteuid() == 0;
  ASSERT_EQ(is_root ? seteuid(65534) : 0, 0);  // root reads and writes everywhere
  expect_user_error([&] { read_file(path("secret")); }, "no permission: cannot open", "give this user access");
  expect_user_error([&] { FileWriter(path("locked/new")); }, "no permission: cannot create", "another path");
  expect_user_error([&] { make_directory(path("locked/new")); }, "no permission", "another path");
  ASSERT_EQ(is_root ? seteuid(0) : 0, 0);
  for (const int error : {EROFS, EPERM}) {
    expect_user_error([&] { fail_io("write", "x", error); }, "no permission: cannot write x", "another path");
  }
  EXPECT_THROW(
      try { fail_io("write", "x", EIO); } catch (const UserError&) {
        ADD_FAILURE() << "not the user's fault";
        throw;
      },
      Error);
}

TEST_F(FileTest, WrongPathsAndKinds) {
  expect_user_error([&] { read_file(path("nowhere")); }, "nowhere", "check the path");
  expect_user_error([&] { MappedFile{path("nowhere")}; }, "nowhere", "check the path");
  expect_user_error([&] { FileWriter{path("no/such/directory")}; }, "cannot create", "check the path");
  expect_user_error([&] { read_file(root); }, "is not a regular file", "check the path");
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);  // refused, not waited for
  expect_user_error([&] { MappedFile{path("pipe")}; }, "is not a regular file", "check the path");
  write_file_synced(path("long"), "12345");
  EXPECT_EQ(read_file(path("long"), 5), "12345");
  expect_user_error([&] { read_file(path("long"), 4); }, "has 5 bytes, at most 4", "damaged");
}

}  // namespace
}  // namespace tessera
