#include "ckpt/manifest.h"

#include "ckpt/test_support.h"

namespace tessera::ckpt {
namespace {

constexpr const char* kGolden =
    R"({"attempt":1,"created_unix_ms":1700000000000,"files":[{"header_bytes":4096,)"
    R"("header_xxh3":"00000000000000000000000000000001","path":"data/part-000.safetensors","size":4120}],"format":1,)"
    R"("model_fingerprint":"m","run_id":"r","state":{"a":[1,2.5],"z":18446744073709551615},"step":100,"tensors":[)"
    R"({"bytes":0,"dtype":"f64","file":0,"name":"a","offset":4096,"shape":[0,3],)"
    R"("xxh3":"00000000000000000000000000000002"},)"
    R"({"bytes":24,"dtype":"f32","file":0,"name":"b","offset":4096,"shape":[2,3],)"
    R"("xxh3":"00000000000000000000000000000003"}],"tokenizer_fingerprint":"t"})";

Manifest sample() {
  Manifest m{100, "r", 1, 1700000000000, "m", "t", R"({ "z" : 18446744073709551615, "a" : [1, 2.5] })", {}, {}};
  m.files = {{"data/part-000.safetensors", 4120, 4096, "00000000000000000000000000000001"}};
  m.tensors = {{"a", DType::f64, {0, 3}, 0, 4096, 0, "00000000000000000000000000000002"},
               {"b", DType::f32, {2, 3}, 0, 4096, 24, "00000000000000000000000000000003"}};
  return m;
}

Manifest parse(const std::string& text) { return parse_manifest(std::as_bytes(std::span(text)), "m.json"); }

TEST(Manifest, CanonicalFormIsByteStable) {
  EXPECT_EQ(to_json(sample()), kGolden);
  EXPECT_EQ(to_json(parse(kGolden)), kGolden);
  EXPECT_EQ(parse(kGolden).state_json, R"({"a":[1,2.5],"z":18446744073709551615})");
  EXPECT_EQ(parse(kGolden).find("b")->bytes, 24);
  EXPECT_EQ(parse(kGolden).find("c"), nullptr);
  EXPECT_EQ(parse(kGolden).tensor_bytes(), 24);
}

TEST(Manifest, RefusesWhatLaterCodeCannotTrust) {
  const auto with = [](const std::string& from, const std::string& to) {
    const std::string text = kGolden;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.substr(0, at) + to + text.substr(at + from.size());
  };
  const std::vector<std::array<std::string, 3>> cases{
      {R"("format":1)", R"("format":2)", "format version 2, this program reads 1"},
      {R"("step":100)", R"("step":-1)", "step is -1"},
      {R"("step":100)", R"("step":100.0)", "step is 100.0"},
      {R"("step":100,)", "", "no \"step\""},
      {R"("step":100)", R"("step":100,"more":1)", "unknown key \"more\""},
      {R"("step":100)", R"("step":100,"step":100)", "stands twice"},
      {R"("run_id":"r")", R"("run_id":1)", "wanted a string"},
      {R"("attempt":1)", R"("attempt":99999999999)", "out of range"},
      {R"("state":{)", R"("state":1,"x":{)", "unknown key"},
      {R"("path":"data/part-000.safetensors")", R"("path":"data/../../x")", "wanted data/NAME"},
      {R"("path":"data/part-000.safetensors")", R"("path":"/etc/passwd")", "wanted data/NAME"},
      {R"("path":"data/part-000.safetensors")", R"("path":"data/..")", "wanted data/NAME"},
      {R"("size":4120)", R"("size":4119)", "end at byte 4120"},
      {R"("size":4120)", R"("size":4000)", "header of 4096 bytes in a file of 4000"},
      {R"("header_bytes":4096)", R"("header_bytes":4095)", "begins at byte 4096"},
      {R"("bytes":24)", R"("bytes":20)", "do not fit"},
      {R"("dtype":"f32")", R"("dtype":"f16")", "dtype \"f16\""},
      {R"("file":0,"name":"b")", R"("file":1,"name":"b")", "in file 1 of 1"},
      {R"("name":"b")", R"("name":"a")", "ascending names"},
      {R"("name":"a")", R"("name":"c")", "ascending names"},
      {R"("shape":[2,3])", R"("shape":[9007199254740991,9007199254740991])", "do not fit"},
      {R"("shape":[2,3])", R"("shape":6)", "wanted a list"},
      {"0000003\"", "000003\"", "32 hexadecimal digits"},
      {"0000003\"", "000000G\"", "32 hexadecimal digits"},
  };
  for (const auto& [from, to, part] : cases) {
    EXPECT_USER_ERROR(parse(with(from, to)), part);
  }
  for (size_t n = 0; n < std::string(kGolden).size(); ++n) {
    EXPECT_THROW(parse(std::string(kGolden).substr(0, n)), UserError) << n;
  }
}

TEST(Manifest, RefusesStateThatIsNoJsonObject) {
  Manifest list = sample(), binary = sample();
  list.state_json = std::string("[1]");
  EXPECT_USER_ERROR(to_json(list), "wanted an object");
  binary.run_id = std::string(1, char(0xff));
  EXPECT_USER_ERROR(to_json(binary), "UTF-8");
}

}  // namespace
}  // namespace tessera::ckpt
