#include "ckpt/safetensors.h"

#include <sys/resource.h>

#include <csignal>

#include "ckpt/collection.h"
#include "ckpt/strict_json.h"
#include "ckpt/test_support.h"

namespace tessera::ckpt {
namespace {

using test::TempDir;

std::string file_text(const std::string& header, const std::string& data, uint64_t length) {
  std::string text(sizeof(length), '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  return text + header + data;
}
std::string file_text(const std::string& header, const std::string& data) {
  return file_text(header, data, header.size());
}
SafetensorsHeader parse(const std::string& text) { return parse_safetensors(std::as_bytes(std::span(text)), "x.st"); }
std::string tensor_json(const std::string& name, const std::string& rest) { return "\"" + name + "\":{" + rest + "}"; }

TEST(Safetensors, ReadsWhatTheWriterWrote) {
  const TempDir dir;
  const test::Tensors tensors = test::sample_tensors(4);
  write_safetensors(dir / "a.safetensors", tensors.refs(), {{"format", "test"}});
  const SafetensorsFile file(dir / "a.safetensors");
  EXPECT_EQ(file.tensors().size(), tensors.refs().size());
  EXPECT_EQ(file.metadata().at("format"), "test");
  for (size_t i = 0; i < tensors.refs().size(); ++i) {
    const TensorInfo& info = file.at(tensors.refs()[i].name);
    const auto& bytes = tensors.storage()[i];
    EXPECT_EQ(info.dtype, tensors.refs()[i].view.dtype());
    EXPECT_EQ(info.shape, spec_of(tensors.refs()[i]).shape);
    ASSERT_EQ(info.bytes, static_cast<int64_t>(bytes.size()));
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), file.data(info))) << info.name;
    EXPECT_EQ(info.offset % bytes_of(info.dtype), 0) << info.name;
  }
  uint64_t length = 0;
  std::memcpy(&length, test::slurp(dir / "a.safetensors").data(), sizeof(length));
  EXPECT_EQ((length + 8) % 4096, 0u);
  EXPECT_FALSE(path_exists(dir / "a.safetensors.partial"));
  EXPECT_USER_ERROR(file.at("nobody"), "no tensor \"nobody\"");
  EXPECT_USER_ERROR(file.read_f32("ids"), "holds I32");
}

TEST(Safetensors, WritesStridedViewsAndNothing) {
  const TempDir dir;
  std::vector<float> wide(6 * 5);
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = float(i);
  const View column = View(wide.data(), DType::f32, {6, 5}).column_range(1, 3);
  write_safetensors(dir / "a.safetensors", std::vector<TensorRef>{{"c", column}});
  const std::vector<float> read = SafetensorsFile(dir / "a.safetensors").read_f32("c");
  ASSERT_EQ(read.size(), 18u);
  for (size_t i = 0; i < read.size(); ++i) EXPECT_EQ(read[i], float(i / 3 * 5 + 1 + i % 3));
  write_safetensors(dir / "b.safetensors", {});
  EXPECT_TRUE(SafetensorsFile(dir / "b.safetensors").tensors().empty());
}

TEST(Safetensors, ConvertsToFloat) {
  // Halves: 1, -2, the smallest subnormal, the largest, infinity; then bf16 and f64 at unaligned places.
  const std::vector<uint16_t> halves{0x3c00, 0xc000, 0x0001, 0x7bff, 0x7c00};
  const bf16 b(3.140625f);
  const double d = 1.0 / 3;
  std::string data(reinterpret_cast<const char*>(halves.data()), 10);
  data += 'x';
  data.append(reinterpret_cast<const char*>(&b), 2);
  data.append(reinterpret_cast<const char*>(&d), 8);
  const std::string header = "{" + tensor_json("h", R"("dtype":"F16","shape":[5],"data_offsets":[0,10])") + "," +
                             tensor_json("u", R"("dtype":"U8","shape":[1],"data_offsets":[10,11])") + "," +
                             tensor_json("b", R"("dtype":"BF16","shape":[],"data_offsets":[11,13])") + "," +
                             tensor_json("d", R"("dtype":"F64","shape":[1,1],"data_offsets":[13,21])") + "}";
  const TempDir dir;
  test::spill(dir / "a.safetensors", file_text(header, data));
  const SafetensorsFile file(dir / "a.safetensors");
  EXPECT_EQ(file.read_f32("h"),
            (std::vector<float>{1.0f, -2.0f, 0x1p-24f, 65504.0f, std::numeric_limits<float>::infinity()}));
  EXPECT_EQ(file.read_f32("b"), std::vector<float>{3.140625f});
  EXPECT_EQ(file.read_f32("d"), std::vector<float>{float(1.0 / 3)});
  EXPECT_EQ(file.at("h").dtype, DType::none);
  EXPECT_EQ(file.at("h").stored, "F16");
}

TEST(Safetensors, RefusesForgedHeaders) {
  const auto one = [](const std::string& rest) { return file_text("{" + tensor_json("a", rest) + "}", "12345678"); };
  struct Case {
    std::string text, part;
  };
  const std::string deep = "{\"a\":" + std::string(100000, '[') + "}";
  const std::vector<Case> cases{
      {"", "0 bytes"},
      {"1234567", "7 bytes"},
      {file_text("{}", "", ~uint64_t{0}), "header of 18446744073709551615 bytes"},
      {file_text("{}", "", 3), "header of 3 bytes in a file of 10"},
      {file_text("", ""), "does not begin with '{'"},
      {file_text(" {}", ""), "does not begin with '{'"},
      {file_text("{} x", ""), "damaged JSON"},
      {file_text("{\"a\":1", ""), "damaged JSON"},
      {file_text("{\"\xff\":1}", ""), "damaged JSON"},
      {file_text(deep, ""), "nested deeper"},
      {file_text("{\"a\":1}", ""), "type number, wanted an object"},
      {file_text("{\"__metadata__\":{\"n\":1}}", ""), "wanted a string"},
      {file_text("{}", "x"), "trailing bytes"},
      {one(R"("shape":[2],"data_offsets":[0,8])"), "no \"dtype\""},
      {one(R"("dtype":"F32","data_offsets":[0,8])"), "no \"shape\""},
      {one(R"("dtype":"F32","shape":[2])"), "no \"data_offsets\""},
      {one(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"), "dtype \"F33\""},
      {one(R"("dtype":4,"shape":[2],"data_offsets":[0,8])"), "wanted a string"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1)"), "unknown key \"more\""},
      {one(R"("dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8])"), "stands twice"},
      {one(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"), "wanted a list"},
      {one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), "extent is -2"},
      {one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), "extent is 2.0"},
      {one(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])"), "wanted an integer"},
      {one(R"("dtype":"F32","shape":[9007199254740992],"data_offsets":[0,8])"), "wanted an integer"},
      {one(R"("dtype":"F32","shape":[4503599627370496,4503599627370496],"data_offsets":[0,8])"), "overflows"},
      {one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), "has 8 bytes, wanted 12"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[-1,8])"), "begin is -1"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0.0,8])"), "begin is 0.0"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])"), "two integers"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "ascending offsets"},
      {one(R"("dtype":"F32","shape":[4],"data_offsets":[0,16])"), "within 8 data bytes"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), "trailing bytes"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), "hole"},
      {file_text("{" + tensor_json("a", R"("dtype":"F32","shape":[2],"data_offsets":[0,8])") + "," +
                     tensor_json("b", R"("dtype":"F32","shape":[1],"data_offsets":[4,8])") + "}",
                 "12345678"),
       "overlap"},
      {file_text("{" + tensor_json("a", R"("dtype":"F32","shape":[2],"data_offsets":[0,8])") + "," +
                     tensor_json("a", R"("dtype":"F32","shape":[2],"data_offsets":[0,8])") + "}",
                 "12345678"),
       "stands twice"},
  };
  for (const Case& c : cases) {
    EXPECT_USER_ERROR(parse(c.text), c.part);
    EXPECT_USER_ERROR(parse(c.text), "x.st");
  }
  EXPECT_EQ(parse(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])")).tensors.size(), 1u);
  // Emptiness hides no overflow, and empty tensors stand anywhere.
  EXPECT_USER_ERROR(
      parse(file_text(
          "{" + tensor_json("a", R"("dtype":"U8","shape":[4503599627370496,4503599627370496,0],"data_offsets":[0,0])") +
              "}",
          "")),
      "overflows");
  EXPECT_EQ(parse(file_text("{" + tensor_json("b", R"("dtype":"U8","shape":[0],"data_offsets":[1,1])") + "," +
                                tensor_json("c", R"("dtype":"U8","shape":[0,3],"data_offsets":[0,0])") + "," +
                                tensor_json("a", R"("dtype":"U8","shape":[1],"data_offsets":[0,1])") + "}",
                            "x"))
                .tensors.size(),
            3u);
}

TEST(Safetensors, TruncationAtEveryLengthIsAnError) {
  const TempDir dir;
  write_safetensors(dir / "a.safetensors", test::sample_tensors(1).refs());
  const std::string text = test::slurp(dir / "a.safetensors");
  for (size_t n = 0; n < text.size(); n += n < 600 ? 1 : 97) {
    EXPECT_THROW(parse(text.substr(0, n)), UserError) << n;
  }
  EXPECT_NO_THROW(parse(text));
  EXPECT_THROW(parse(text + "x"), UserError);
}

TEST(Safetensors, FullDiskAndSizeLimitAreUserErrors) {
  const test::Tensors tensors = test::sample_tensors(1);
  const std::vector<TensorRef> one{tensors.refs()[1]};
  EXPECT_USER_ERROR(
      {
        SafetensorsWriter writer("/dev/full", {spec_of(one[0])}, {});
        writer.append(one[0].view);
        writer.finish();
      },
      "disk full: cannot write /dev/full");

  const TempDir dir;
  struct rlimit before {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 8192, before.rlim_max };
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message = test::user_error([&] { write_safetensors(dir / "a.safetensors", tensors.refs()); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("file too large"), std::string::npos) << message;
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(Collection, ReadsIndexDirectoryAndSingleFile) {
  const TempDir dir;
  test::Tensors a, b;
  a.add("a.weight", DType::f32, {2, 3});
  b.add("b.weight", DType::f32, {4});
  a.fill(1);
  b.fill(2);
  write_safetensors(dir / "model-00001-of-00002.safetensors", a.refs());
  write_safetensors(dir / "model-00002-of-00002.safetensors", b.refs());

  EXPECT_EQ(open_collection(dir.path()).names(), (std::vector<std::string>{"a.weight", "b.weight"}));
  EXPECT_EQ(open_collection(dir / "model-00002-of-00002.safetensors").names(), std::vector<std::string>{"b.weight"});

  const std::string index = dir / "model.safetensors.index.json";
  const auto write_index = [&](const std::string& map) {
    test::spill(index, "{\"metadata\":{\"total_size\":40},\"weight_map\":{" + map + "}}");
  };
  write_index(R"("a.weight":"model-00001-of-00002.safetensors","b.weight":"model-00002-of-00002.safetensors")");
  for (const std::string& path : {dir.path(), index}) {
    const Collection collection = open_collection(path);
    EXPECT_EQ(collection.files().size(), 2u);
    EXPECT_EQ(collection.at("a.weight").shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(std::memcmp(collection.data("b.weight"), b.storage()[0].data(), 16), 0);
    EXPECT_EQ(collection.read_f32("a.weight").size(), 6u);
    EXPECT_EQ(collection.find("c"), nullptr);
    EXPECT_USER_ERROR(collection.at("c"), "no tensor \"c\" among its 2");
  }

  write_index(R"("b.weight":"model-00001-of-00002.safetensors")");
  EXPECT_USER_ERROR(open_collection(index), "it is not there");
  write_index(R"("b.weight":"../model-00001-of-00002.safetensors")");
  EXPECT_USER_ERROR(open_collection(index), "file beside the index");
  write_index(R"("b.weight":"model-00003-of-00002.safetensors")");
  EXPECT_USER_ERROR(open_collection(index), "model-00003-of-00002.safetensors");
  test::spill(index, "{\"weight_map\":[]}");
  EXPECT_USER_ERROR(open_collection(index), "weight_map is of type array");
  test::spill(index, "{}");
  EXPECT_USER_ERROR(open_collection(index), "no \"weight_map\"");

  std::filesystem::remove(index);
  write_safetensors(dir / "z.safetensors", a.refs());
  EXPECT_USER_ERROR(open_collection(dir.path()), "is in both");
  EXPECT_USER_ERROR(open_collection(dir / "nothing"), "check the path");
  std::filesystem::create_directory(dir / "bare");
  EXPECT_USER_ERROR(open_collection(dir / "bare"), "holds no *.safetensors");
}

}  // namespace
}  // namespace tessera::ckpt
