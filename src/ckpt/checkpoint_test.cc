#include "ckpt/checkpoint.h"

#include <sys/mount.h>
#include <sys/resource.h>

#include <csignal>

#include "ckpt/directory.h"
#include "ckpt/safetensors.h"
#include "ckpt/test_support.h"

namespace tessera::ckpt {
namespace {

namespace fs = std::filesystem;
using test::holds_sample;
using test::save_sample;
using test::TempDir;

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<int64_t> steps_in(const std::string& root) {
  std::vector<int64_t> steps;
  for (const Entry& entry : list(root)) steps.push_back(entry.step);
  return steps;
}

TEST(Checkpoint, RoundTripInOneFileOrMany) {
  for (const int64_t file_bytes : {int64_t{1}, int64_t{6000}, int64_t{4} << 30}) {
    const TempDir dir;
    SaveOptions options;
    options.file_bytes = file_bytes;
    const SaveReport report = save_sample(dir / "deep/root", 100, options);
    EXPECT_TRUE(report.warnings.empty());
    EXPECT_EQ(fs::path(report.path).filename(), "step-000000000100");
    EXPECT_TRUE(holds_sample(report.path, 100));

    const Manifest manifest = open(report.path).manifest();
    EXPECT_EQ(manifest.step, 100);
    EXPECT_EQ(manifest.run_id, "nano-7");
    EXPECT_EQ(manifest.attempt, 2);
    EXPECT_EQ(manifest.model_fingerprint, "model-a1");
    EXPECT_EQ(manifest.state_json,
              R"({"loader":{"epoch":0.25,"file":3},"rng":{"seed":18446744073709551615},"stage":"warm"})");
    EXPECT_EQ(manifest.files.size(), file_bytes == 1 ? 9u : file_bytes == 6000 ? 3u : 1u);
    // The payload is plain safetensors: any tool reads it.
    for (const FileRecord& file : manifest.files) {
      const SafetensorsFile payload(join(report.path, file.path));
      EXPECT_EQ(payload.metadata().at("step"), "100");
      EXPECT_EQ(file.header_bytes % 4096, 0);
    }

    const Verification verified = verify(report.path);
    EXPECT_TRUE(verified.pass);
    EXPECT_EQ(verified.step, 100);
    EXPECT_EQ(verified.tensors, 9);
    const Inspection inspection = inspect(report.path);
    EXPECT_EQ(inspection.bytes, report.bytes);
    EXPECT_EQ(inspection.tensor_bytes, manifest.tensor_bytes());
    const auto entries = list(dir / "deep/root");
    ASSERT_EQ(entries.size(), 1u);
    EXPECT_EQ(entries[0].bytes, report.bytes);
    EXPECT_EQ(entries[0].problem, "");
    EXPECT_TRUE(entries[0].committed);
    EXPECT_EQ(entries[0].created_unix_ms, manifest.created_unix_ms);
    EXPECT_EQ(test::slurp(dir / "deep/root/LATEST"), "step-000000000100\n");
  }
}

TEST(Checkpoint, WithoutTensorsAndWithoutCheckpoints) {
  const TempDir dir;
  EXPECT_TRUE(list(dir / "none").empty());
  EXPECT_FALSE(newest_valid(dir / "none"));
  EXPECT_FALSE(newest_valid(dir.path()));
  CheckpointState state;
  const SaveReport report = save(dir.path(), state);
  EXPECT_TRUE(verify(report.path).pass);
  load_all(open(report.path), {});
}

TEST(Checkpoint, StridedViewsOnBothSides) {
  const TempDir dir;
  std::vector<float> wide(7 * 10), back(7 * 9, -1.0f);
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = float(i);
  CheckpointState state;
  state.tensors = {{"w", View(wide.data(), DType::f32, {7, 10}).column_range(2, 4)}};
  const SaveReport report = save(dir.path(), state);
  open(report.path).read_into("w", View(back.data(), DType::f32, {7, 9}).column_range(5, 4));
  for (size_t r = 0; r < 7; ++r) {
    for (size_t c = 0; c < 9; ++c) EXPECT_EQ(back[r * 9 + c], c < 5 ? -1.0f : float(r * 10 + c - 3));
  }
}

TEST(Checkpoint, LoadReportsEverythingThatDoesNotFitAndLoadsNothing) {
  const TempDir dir;
  const std::string path = save_sample(dir.path(), 5).path;
  test::Tensors wanted;
  wanted.add("embedding", DType::f32, {64, 48});
  wanted.add("norm", DType::bf16, {12});
  wanted.add("counts", DType::i32, {9});
  wanted.add("not.there", DType::f32, {1});
  wanted.add("nor.this", DType::f32, {1});
  wanted.add("empty", DType::f32, {0, 7});
  wanted.add("scale", DType::f64, Shape{1});
  wanted.fill(9);
  const auto before = wanted.storage();
  const std::string message = test::user_error([&] { load_all(open(path), wanted.refs()); });
  for (const char* part :
       {"nothing loaded", "missing in the checkpoint (2)", "not.there", "nor.this", "in the checkpoint only (4)",
        "optimizer.v", "layers.0.moe.experts.3.w_gate", "of another type or shape (3)",
        "norm: shape is (11), wanted (12)", "counts: type is i64, wanted i32", "scale: shape is (), wanted (1)"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " in " << message;
  }
  EXPECT_EQ(wanted.storage(), before);

  const std::vector<TensorRef> some{wanted.refs()[0]};
  EXPECT_USER_ERROR(load_all(open(path), some), "in the checkpoint only (8)");
  load_all(open(path), some, /*allow_extra=*/true);
  EXPECT_EQ(wanted.storage()[0], test::sample_tensors(5).storage()[1]);
  EXPECT_USER_ERROR(open(path).read_into("not.there", some[0].view), "no tensor \"not.there\"");
  EXPECT_USER_ERROR(open(path).read_into("ids", some[0].view), "type is i32, wanted f32");
}

TEST(Checkpoint, AnotherModelIsNamed) {
  const TempDir dir;
  const Reader reader = open(save_sample(dir.path(), 5).path);
  reader.require_fingerprints("model-a1", "bytes-1");
  reader.require_fingerprints("", "");
  EXPECT_USER_ERROR(reader.require_fingerprints("model-b2", ""),
                    "written for model model-a1, this run has model model-b2");
  EXPECT_USER_ERROR(reader.require_fingerprints("model-a1", "bpe"), "tokenizer bytes-1, this run has tokenizer bpe");
}

TEST(Checkpoint, SameStepTwiceReplacesIt) {
  const TempDir dir;
  save_sample(dir.path(), 4);
  save_sample(dir.path(), 5);
  const SaveReport report = save_sample(dir.path(), 5, {}, 77);
  EXPECT_TRUE(report.warnings.empty());
  EXPECT_TRUE(holds_sample(report.path, 77));
  EXPECT_EQ(names_in(dir.path()),
            (std::vector<std::string>{".lock", "LATEST", "step-000000000004", "step-000000000005"}));
  // A damaged one is replaced too.
  fs::remove(join(report.path, "COMMITTED"));
  save_sample(dir.path(), 5);
  EXPECT_TRUE(holds_sample(report.path, 5));
}

TEST(Checkpoint, RetentionKeepsTheNewestAndTheMultiples) {
  const TempDir dir;
  SaveOptions options;
  options.keep_last = 2;
  options.keep_every_steps = 30;
  for (int64_t step = 10; step <= 80; step += 10) save_sample(dir.path(), step, options);
  EXPECT_EQ(steps_in(dir.path()), (std::vector<int64_t>{30, 60, 70, 80}));
  // Damaged ones do not count, so that two good ones stay.
  fs::resize_file(dir / "step-000000000080/data/part-000.safetensors", 100);
  EXPECT_EQ(save_sample(dir.path(), 90, options).removed, std::vector<std::string>{});
  EXPECT_EQ(steps_in(dir.path()), (std::vector<int64_t>{30, 60, 70, 80, 90}));
  // A run that went back saves a lower step than others: what it just wrote stays.
  options.keep_every_steps = 0;
  save_sample(dir.path(), 65, options);
  EXPECT_EQ(steps_in(dir.path()), (std::vector<int64_t>{65, 70, 80, 90}));
  EXPECT_EQ(prune(dir.path(), 1, 0).size(), 3u);
  EXPECT_EQ(steps_in(dir.path()), std::vector<int64_t>{90});
  EXPECT_EQ(prune(dir.path(), 1, 0).size(), 0u);
  EXPECT_USER_ERROR(prune(dir.path(), 0, 0), "wanted at least 1");
  options.keep_last = 0;
  EXPECT_USER_ERROR(save_sample(dir.path(), 100, options), "keep_last is 0");
}

TEST(Checkpoint, LeftoversOfDeadWritersGoAndForeignNamesStay) {
  const TempDir dir;
  const std::string path = save_sample(dir.path(), 3).path;
  fs::create_directories(dir / "step-000000000004.tmp/data");
  fs::create_directories(dir / ".trash-step-000000000001/data");
  fs::create_directories(dir / "step-000000000003.a01.tmp/data");
  for (const char* foreign : {"step-9", "step-000000000009.bak", "my.tmp", ".trash-mine"}) {
    fs::create_directory(dir / foreign);
  }
  // Complete, but the rename did not happen: readers take it, and the next save finishes it.
  const std::string unnamed = dir / "step-000000000007.tmp";
  fs::rename(save_sample(dir.path(), 7).path, unnamed);
  ASSERT_TRUE(newest_valid(dir.path()));
  EXPECT_EQ(newest_valid(dir.path())->path, unnamed);
  EXPECT_EQ(steps_in(dir.path()), (std::vector<int64_t>{3, 7}));

  EXPECT_TRUE(save_sample(dir.path(), 8).warnings.empty());
  EXPECT_EQ(names_in(dir.path()),
            (std::vector<std::string>{".lock", ".trash-mine", "LATEST", "my.tmp", "step-000000000003",
                                      "step-000000000007", "step-000000000008", "step-000000000009.bak", "step-9"}));
  EXPECT_TRUE(holds_sample(dir / "step-000000000007", 7));
}

TEST(Checkpoint, OneWriterADirectory) {
  const TempDir dir;
  int ready[2], done[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(done), 0);
  const pid_t child = fork();
  if (child == 0) {
    const WriterLock lock(dir.path());
    char byte = 1;
    _exit(write(ready[1], &byte, 1) == 1 && read(done[0], &byte, 1) == 1 ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_USER_ERROR(save_sample(dir.path(), 1), fmt::format("is held by pid {} on ", child));
  ASSERT_EQ(write(done[1], &byte, 1), 1);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);

  const WriterLock mine(dir.path());  // of a dead holder nothing remains, and within a process the lock is shared
  const WriterLock again(dir.path());
  save_sample(dir.path(), 1);
  EXPECT_EQ(test::run_in_child([&] {
              try {
                save_sample(dir.path(), 2);
              } catch (const UserError&) {
                return 7;
              }
              return 0;
            }),
            7 << 8)
      << "a forked child must not inherit the right to write";
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) close(fd);
}

TEST(Checkpoint, ReadOnlyDirectoryIsAUserError) {
  const TempDir dir;
  fs::permissions(dir.path(), fs::perms(0755));
  fs::create_directory(dir / "root");
  fs::permissions(dir / "root", fs::perms(0555));
  const bool is_root = geteuid() == 0;
  ASSERT_EQ(is_root ? seteuid(65534) : 0, 0);  // root writes everywhere
  const std::string message = test::user_error([&] { save_sample(dir / "root", 1); });
  const std::string deeper = test::user_error([&] { save_sample(dir / "root/new", 1); });
  ASSERT_EQ(is_root ? seteuid(0) : 0, 0);
  EXPECT_NE(message.find("no permission"), std::string::npos) << message;
  EXPECT_NE(deeper.find("no permission"), std::string::npos) << deeper;
}

TEST(Checkpoint, SizeLimitLeavesNothingBehind) {
  const TempDir dir;
  save_sample(dir.path(), 1);
  const auto before = names_in(dir.path());
  struct rlimit limit {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 8192, limit.rlim_max };
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message = test::user_error([&] { save_sample(dir.path(), 2); });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("file too large"), std::string::npos) << message;
  EXPECT_EQ(names_in(dir.path()), before);
  save_sample(dir.path(), 2);
  EXPECT_EQ(newest_valid(dir.path())->step, 2);
}

TEST(Checkpoint, FullDiskLeavesTheOldSetAndHealsWhenThereIsSpace) {
  const TempDir dir;
  if (mount("tmpfs", dir.path().c_str(), "tmpfs", 0, "size=128k") != 0) GTEST_SKIP() << "no right to mount a tmpfs";
  const std::string ballast = dir / "ballast";
  save_sample(dir.path(), 1);
  const auto before = names_in(dir.path());
  for (int kib = 0; kib < 24; kib += 4) {  // full at several points: payload, manifest, commit mark, directories
    fs::remove(ballast);
    const auto free = fs::space(dir.path()).available;
    test::spill(ballast, std::string(free - static_cast<size_t>(kib) * 1024, 'x'));
    EXPECT_USER_ERROR(save_sample(dir.path(), 2), "disk full");
    fs::remove(ballast);
    EXPECT_EQ(names_in(dir.path()), before);
    EXPECT_TRUE(verify(newest_valid(dir.path())->path).pass);
  }
  save_sample(dir.path(), 2);
  EXPECT_TRUE(holds_sample(newest_valid(dir.path())->path, 2));
  umount(dir.path().c_str());
}

}  // namespace
}  // namespace tessera::ckpt
