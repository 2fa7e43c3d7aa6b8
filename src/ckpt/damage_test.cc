// Damage of every kind must be found, named, and stepped over.
#include "ckpt/checkpoint.h"
#include "ckpt/directory.h"
#include "ckpt/test_support.h"

namespace tessera::ckpt {
namespace {

namespace fs = std::filesystem;
using test::save_sample;
using test::slurp;
using test::spill;
using test::TempDir;

std::vector<std::string> files_of(const std::string& path) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(fs::relative(entry.path(), path).string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// The tensor that owns this byte; empty: the file's header or no payload.
std::string tensor_at(const Manifest& manifest, const std::string& file, int64_t byte) {
  for (const TensorRecord& tensor : manifest.tensors) {
    if (manifest.files[static_cast<size_t>(tensor.file)].path == file && byte >= tensor.offset &&
        byte < tensor.offset + tensor.bytes) {
      return tensor.name;
    }
  }
  return "";
}

std::string save_in_parts(const std::string& root, int64_t step) {
  SaveOptions options;
  options.file_bytes = 6000;
  return save_sample(root, step, options).path;
}

TEST(Damage, EveryFlippedBitIsFoundAndItsTensorNamed) {
  const TempDir dir;
  const std::string path = save_in_parts(dir.path(), 1);
  const Manifest manifest = open(path).manifest();
  const Philox random(11, Purpose::test);
  uint64_t draw = 0;
  for (const std::string& file : files_of(path)) {
    const std::string text = slurp(join(path, file));
    const size_t flips = file == "COMMITTED" ? text.size() : 60;
    for (size_t i = 0; i < flips; ++i) {
      const uint64_t bits = random.bits(draw++);
      const size_t at = file == "COMMITTED" ? i : bits % text.size();
      std::string damaged = text;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (bits >> 32) % 8));
      spill(join(path, file), damaged);
      const Verification result = verify(path);
      EXPECT_FALSE(result.pass) << file << " byte " << at;
      ASSERT_EQ(result.bad.size(), 1u) << file << " byte " << at;
      EXPECT_EQ(result.bad[0].tensor, tensor_at(manifest, file, static_cast<int64_t>(at)));
      const std::string where = file == "COMMITTED" ? "" : file;
      EXPECT_NE(result.bad[0].why.find(where), std::string::npos) << result.bad[0].why;
    }
    spill(join(path, file), text);
  }
  EXPECT_TRUE(verify(path).pass);
}

TEST(Damage, LoadingADamagedTensorNamesIt) {
  const TempDir dir;
  const std::string path = save_in_parts(dir.path(), 1);
  const Reader reader = open(path);
  const TensorRecord& record = *reader.manifest().find("optimizer.v");
  const std::string file = join(path, reader.manifest().files[static_cast<size_t>(record.file)].path);
  std::string text = slurp(file);
  text[static_cast<size_t>(record.offset) + 17] ^= 4;
  spill(file, text);
  const test::Tensors tensors = test::sample_tensors(2);
  EXPECT_USER_ERROR(load_all(open(path), tensors.refs()), "damaged tensors (1):\n  optimizer.v:");
  EXPECT_USER_ERROR(open(path).read_into("optimizer.v", tensors.refs()[4].view), "optimizer.v is damaged");
  open(path).read_into("scale", tensors.refs()[3].view);
}

TEST(Damage, TruncatedAndGrownFilesAreSteppedOver) {
  const TempDir dir;
  const std::string good = save_in_parts(dir.path(), 1), path = save_in_parts(dir.path(), 2);
  for (const std::string& file : files_of(path)) {
    const std::string text = slurp(join(path, file));
    std::vector<size_t> lengths{text.size() - 1, text.size() + 1};
    for (size_t n = 0; n < text.size(); n += std::max<size_t>(1, text.size() / 60)) lengths.push_back(n);
    for (const size_t n : lengths) {
      spill(join(path, file), n < text.size() ? text.substr(0, n) : text + "x");
      std::vector<Entry> skipped;
      const auto newest = newest_valid(dir.path(), &skipped);
      ASSERT_TRUE(newest);
      EXPECT_EQ(newest->path, good) << file << " cut to " << n;
      ASSERT_EQ(skipped.size(), 1u);
      EXPECT_NE(skipped[0].problem, "");
      EXPECT_FALSE(verify(path).pass);
      EXPECT_THROW(open(path), UserError);
    }
    spill(join(path, file), text);
  }
  EXPECT_EQ(newest_valid(dir.path())->path, path);
}

TEST(Damage, MissingFilesAreNamed) {
  const TempDir dir;
  const std::string path = save_in_parts(dir.path(), 1);
  for (const std::string& file : files_of(path)) {
    const std::string text = slurp(join(path, file));
    fs::remove(join(path, file));
    EXPECT_USER_ERROR(open(path), file);
    const Verification result = verify(path);
    ASSERT_EQ(result.bad.size(), 1u);
    EXPECT_NE(result.bad[0].why.find(file), std::string::npos);
    EXPECT_EQ(list(dir.path())[0].committed, file != "COMMITTED");
    EXPECT_FALSE(newest_valid(dir.path()));
    spill(join(path, file), text);
  }
  EXPECT_USER_ERROR(open(dir / "step-000000000009"), "is no directory");
  EXPECT_USER_ERROR(verify(dir / "step-000000000009"), "is no directory");
  EXPECT_USER_ERROR(open(dir.path()), "has no COMMITTED");
}

TEST(Damage, FilesOfAnotherStepAreFoundOut) {
  const TempDir dir;
  const std::string one = save_in_parts(dir.path(), 1), two = save_in_parts(dir.path(), 2);
  const std::string part = "data/part-001.safetensors", mine = slurp(join(two, part));
  fs::copy_file(join(one, part), join(two, part), fs::copy_options::overwrite_existing);
  EXPECT_EQ(slurp(join(two, part)).size(), mine.size());
  EXPECT_FALSE(verify(two).pass);
  spill(join(two, part), mine);
  fs::copy_file(join(one, "manifest.json"), join(two, "manifest.json"), fs::copy_options::overwrite_existing);
  EXPECT_USER_ERROR(open(two), "not what COMMITTED says");
  fs::copy_file(join(one, "COMMITTED"), join(two, "COMMITTED"), fs::copy_options::overwrite_existing);
  EXPECT_USER_ERROR(open(two), "holds step 1");
  EXPECT_EQ(newest_valid(dir.path())->step, 1);
}

TEST(Damage, DamagedJsonUnderARightHashIsAUserError) {
  const TempDir dir;
  const std::string path = save_in_parts(dir.path(), 1);
  const std::string text = slurp(join(path, "manifest.json"));
  for (const std::string& forged : {text.substr(0, text.size() / 2), std::string("{}"), text + "x", std::string()}) {
    spill(join(path, "manifest.json"), forged);
    spill(join(path, "COMMITTED"), commit_line(forged, 1));
    EXPECT_USER_ERROR(open(path), "manifest.json");
    EXPECT_FALSE(verify(path).pass);
  }
}

}  // namespace
}  // namespace tessera::ckpt
