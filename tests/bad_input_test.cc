// What users get wrong, as a table: exit code 2, one message that says what was found and what to do, nothing on
// stdout, nothing changed on the disk.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "ckpt/checkpoint.h"
#include "ckpt/safetensors.h"
#include "ckpt/safetensors_writer.h"
#include "ops/gemm/gemm.h"
#include "support.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Words = std::vector<std::string>;

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// Every file below a directory with its size and time of change.
std::map<std::string, std::string> tree_of(const std::string& directory) {
  std::map<std::string, std::string> tree;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    const bool file = entry.is_regular_file();
    // The lock holds the pid of who held it last.
    if (entry.path().filename() == ".lock") continue;
    tree[entry.path().string()] =
        file ? fmt::format("{} bytes, {}", entry.file_size(), entry.last_write_time().time_since_epoch().count()) : "";
  }
  return tree;
}

void expect_refused(const Outcome& o, const Words& message) {
  EXPECT_EQ(o.exit_code, 2) << o.err;
  EXPECT_EQ(o.out, "");
  const size_t begin = o.err.find("tessera: ");
  ASSERT_TRUE(begin == 0 || (begin != std::string::npos && o.err[begin - 1] == '\n')) << o.err;
  EXPECT_EQ(o.err.find("tessera: ", begin + 1), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("rule broken"), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("terminate"), std::string::npos) << o.err;
  for (const std::string& part : message) {
    EXPECT_NE(o.err.find(part, begin), std::string::npos) << "wanted: " << part << "\nfound: " << o.err;
  }
}

// A mounted tmpfs, where this process may mount one.
class Tmpfs {
 public:
  Tmpfs(const std::string& path, const std::string& options) : path_(path) {
    fs::create_directories(path);
    mounted_ = mount("tmpfs", path.c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~Tmpfs() {
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  bool make_read_only() { return mount("tmpfs", path_.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr) == 0; }

 private:
  std::string path_;
  bool mounted_ = false;
};

class BadInput : public ::testing::Test {
 protected:
  struct Case {
    std::string what;
    Words arguments;
    Words message;
  };

  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    write_small_run(*dir_, 12, "[checkpoint]\nevery = 6\n");
    const Outcome run = tessera({"train", path("run.toml")});
    ASSERT_EQ(run.exit_code, 0) << run.err;
  }
  static void TearDownTestSuite() { delete dir_; }

  static std::string path(const std::string& name) { return dir_->path(name); }
  // The run with a directory of its own that nobody has made.
  static Words train(Words more = {}) {
    Words all{"train", path("run.toml"), "--run.dir", path("fresh")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static Words train_model(const std::string& name, const std::string& from, const std::string& to) {
    write_file(path(name), replaced(read_file(path("model.toml")), from, to));
    return train({"--model.file", path(name)});
  }
  static std::string run_file(const std::string& name, const std::string& from, const std::string& to) {
    write_file(path(name), replaced(read_file(path("run.toml")), from, to));
    return path(name);
  }
  static void check(const std::vector<Case>& cases) {
    for (const Case& c : cases) {
      SCOPED_TRACE(c.what);
      const auto before = tree_of(dir_->path());
      expect_refused(tessera(c.arguments), c.message);
      EXPECT_EQ(tree_of(dir_->path()), before);
    }
  }
  static Outcome build(const std::string& text, const std::string& store, Words more = {}) {
    Words all{"data", "build", path(text), "--out", path(store)};
    all.insert(all.end(), more.begin(), more.end());
    return tessera(all);
  }

  static TemporaryDirectory* dir_;
};

TemporaryDirectory* BadInput::dir_ = nullptr;

TEST_F(BadInput, CommandLine) {
  check({
      {"unknown command", {"tarin"}, {"unknown command 'tarin'", "did you mean 'train'"}},
      {"unknown option", {"generate", path("run"), "--promt", "x"}, {"'--promt'", "did you mean '--prompt'"}},
      {"missing argument", {"generate"}, {"checkpoint is required", "tessera generate --help"}},
      {"key that is none", train({"--train.stepz", "3"}), {"'--train.stepz'", "did you mean '--train.steps'"}},
      {"value of another type", train({"--train.steps", "many"}), {"train.steps", "'many'", "an integer"}},
      {"--set without a value", train({"--set", "train.steps"}), {"--set", "KEY=VALUE"}},
      {"no such checkpoint", {"generate", path("nowhere")}, {"nowhere", "no such checkpoint or run directory"}},
      {"no checkpoint in it", {"eval", path("text")}, {"text", "holds no checkpoint"}},
      {"no such run to list", {"ckpt", "list", path("nowhere")}, {"nowhere", "no such directory"}},
      {"no such model to plan", {"plan", "model", path("nowhere.toml")}, {"nowhere.toml", "No such file"}},
      {"no such prompt", {"generate", path("run"), "--prompt-file", path("none.txt")}, {"none.txt", "cannot be read"}},
      {"unknown op", {"bench", "kdaa"}, {"kdaa", "known:"}},
  });
}

TEST_F(BadInput, RunFile) {
  const std::string mistyped = run_file("mistyped.toml", "steps = 12", "stesp = 4");
  const std::string unknown = run_file("unknown.toml", "steps = 12", "steps = 12\nfrobnicate = true");
  const std::string table = run_file("table.toml", "[train]", "[trian]");
  const std::string typed = run_file("typed.toml", "steps = 12", "steps = \"many\"");
  const std::string negative = run_file("negative.toml", "steps = 12", "steps = -4");
  const std::string syntax = run_file("syntax.toml", "steps = 12", "steps = ");
  const std::string grouped = path("grouped.toml");
  write_file(grouped, replaced(read_file(path("model.toml")), "experts = 8\n", "experts = 8\ngroups = 2\n"));
  const std::string deep = path("deep.toml");
  write_file(deep, replaced(read_file(path("model.toml")), "layers = 3\n", "layers = 4\n"));
  check({
      {"mistyped key", {"train", mistyped}, {"mistyped.toml:10:", "'train.stesp'", "did you mean 'train.steps'"}},
      {"unknown key", {"train", unknown}, {"unknown.toml:11:", "'train.frobnicate'", "known keys of [train]"}},
      {"mistyped table", {"train", table}, {"table.toml:9:", "unknown table [trian]", "did you mean [train]"}},
      {"wrong type", {"train", typed}, {"typed.toml:10:", "train.steps", "the string \"many\"", "an integer"}},
      {"out of range", {"train", negative}, {"negative.toml:10:", "train.steps", "-4", "at least 0"}},
      {"not TOML", {"train", syntax}, {"syntax.toml:10"}},
      {"no such run file", {"train", path("runn.toml")}, {"runn.toml", "No such file", "did you mean 'run.toml'"}},
      {"no such model file", train({"--model.file", path("modle.toml")}), {"modle.toml", "No such file"}},
      {"no such store", train({"--data.store", path("nowhere")}), {"nowhere", "no token store", "tessera data build"}},
      {"micro-batch that does not divide",
       train({"--train.micro_tokens", "384"}),
       {"train.micro_tokens is 384", "data.context 128", "tokens_per_step 1024"}},
      {"step that is no multiple",
       train({"--train.tokens_per_step", "1000"}),
       {"train.tokens_per_step is 1000", "896"}},
      {"device that is not here", train({"--run.device", "cuda"}), {"device \"cuda\"", "set device = \"cpu\""}},
      {"device that is none", train({"--run.device", "tpu"}), {"run.device", "tpu", "\"cpu\", \"cuda\""}},
      {"warm-up longer than the run", train({"--train.steps", "3"}), {"warm-up of 4 steps", "optim.warmup_steps"}},
      {"quantile balancing with expert groups",
       train({"--model.file", grouped}),
       {"moe.groups is 2", "balance.method = \"sign\""}},
      {"more bins than a GPU counts",
       {"plan", "memory", path("run.toml"), "--device", "cuda", "--balance.bins", "4000"},
       {"balance.bins is 4000", "may make 8000", "balance.bins = 3500"}},
      {"more processes than layers",
       train({"--parallel.pipeline", "4"}),
       {"parallel.pipeline = 4", "has 3 layers", "set parallel.pipeline = 3 or less"}},
      {"more runs of layers than layers",
       train({"--parallel.pipeline", "2", "--parallel.pipeline_chunks", "2"}),
       {"2 processes with 2 runs of layers each", "has 3 layers", "parallel.pipeline_chunks = 1"}},
      {"runs of layers without a pipeline",
       train({"--parallel.pipeline_chunks", "3"}),
       {"parallel.pipeline_chunks = 3", "parallel.pipeline is 1", "parallel.pipeline = 2"}},
      {"micro-batches in uneven groups",
       train({"--model.file", deep, "--train.micro_tokens", "1024", "--parallel.pipeline", "2",
              "--parallel.pipeline_chunks", "2"}),
       {"the 1 micro-batches", "groups of 2", "train.micro_tokens = 512 (2 micro-batches)"}},
      {"recompute of no layer", train({"--train.recompute", "[7]"}), {"train.recompute names layer 7", "has 3"}},
  });
}

TEST_F(BadInput, WidthsThatProcessesCannotShare) {
  const auto cut = [](Words command, const char* processes) {
    command.insert(command.end(), {"--parallel.tensor", processes});
    return command;
  };
  check({
      {"KDA heads",
       cut(train({}), "3"),
       {"parallel.tensor = 3 does not divide kda.heads = 2 of", "model.toml", "every width it cuts is 2"}},
      {"more than there are heads", cut(train({}), "64"), {"parallel.tensor = 64", "kda.heads = 2", "it cuts is 2"}},
      {"MLA heads",
       cut(train_model("mla.toml", "[mla]\nheads = 2", "[mla]\nheads = 3"), "2"),
       {"parallel.tensor = 2 does not divide mla.heads = 3", "it cuts is 1"}},
      {"dense FFN",
       cut(train_model("dense.toml", "dense_hidden = 64", "dense_hidden = 63"), "2"),
       {"parallel.tensor = 2 does not divide ffn.dense_hidden = 63", "it cuts is 1"}},
      {"shared experts",
       cut(train_model("shared.toml", "hidden = 32\n", "hidden = 31\n"), "2"),
       {"parallel.tensor = 2 does not divide moe.shared * moe.hidden = 31", "it cuts is 1"}},
      {"no process", cut(train({}), "0"), {"parallel.tensor", "0", "at least 1"}},
  });
}

TEST_F(BadInput, ProductThatTheCpuLacks) {
  if (ops::cpu_has_bf16_products()) GTEST_SKIP() << "this CPU has bf16 products";
  check({{"bf16", train({"--train.product", "bf16"}), {"train.product is \"bf16\"", "use \"f32\""}}});
}

TEST_F(BadInput, ModelFile) {
  check({
      {"unknown key",
       train_model("key.toml", "experts", "expertz"),
       {"key.toml:", "'moe.expertz'", "did you mean 'moe.experts'"}},
      {"layer that is not there",
       train_model("layer.toml", "mla_layers = [3]", "mla_layers = [4]"),
       {"mla_layers names layer 4", "the model has 3"}},
      {"layer 0", train_model("zero.toml", "mla_layers = [3]", "mla_layers = [0]"), {"mla_layers", "at least 1"}},
      {"more experts a token than there are",
       train_model("top.toml", "top_k = 2", "top_k = 9"),
       {"moe.top_k is 9", "moe.experts 8"}},
      {"vocabulary below the tokenizer's",
       train_model("small.toml", "layers = 3", "layers = 3\nvocabulary = 64"),
       {"272 ids", "only 64", "vocabulary = 272"}},
      {"odd chunk", train_model("chunk.toml", "chunk = 16", "chunk = 24"), {"kda.chunk is 24", "16, 32 or 64"}},
  });
}

TEST_F(BadInput, CheckpointOfAnotherModelOrOrder) {
  Words other = train_model("wide.toml", "width = 32", "width = 48");
  other[3] = path("run");
  check({
      {"another model", other, {"step-000000000012", "another model (width = 32, not width = 48 of", "wide.toml"}},
      {"another seed", {"train", path("run.toml"), "--run.seed", "7"}, {"another order of data", "run.seed"}},
  });
}

TEST_F(BadInput, Corpus) {
  fs::create_directories(path("empty"));
  write_file(path("latin.txt"), "caf\xe9 and more text than the shortest document needs\n");
  check({
      {"nothing to read", {"data", "build", path("empty"), "--out", path("s")}, {"no documents", "empty"}},
      {"not there", {"data", "build", path("nowhere"), "--out", path("s")}, {"nowhere"}},
      {"not UTF-8", {"data", "build", path("latin.txt"), "--out", path("s")}, {"latin.txt", "byte 3 (0xE9)", "iconv"}},
  });
}

double last_loss(const std::string& run_dir) {
  double loss = NAN;
  std::istringstream rows(read_file(run_dir + "/metrics.jsonl"));
  for (std::string line; std::getline(rows, line);) {
    const json row = json::parse(line);
    if (row.contains("loss")) loss = row["loss"].is_number() ? row["loss"].get<double>() : NAN;
  }
  return loss;
}

TEST_F(BadInput, DocumentsOfAnyLengthWork) {
  for (int64_t i = 0; i < 40; ++i) write_file(path(fmt::format("long/{}.txt", i)), sample_text(600, uint64_t(i)));
  // With the end of text: two and three tokens, fewer than the convolution is wide.
  for (int64_t i = 0; i < 400; ++i) {
    write_file(path(fmt::format("short/{}.txt", i)), i < 20 ? std::string(1, char('a' + i)) : fmt::format("{:x}", i));
  }
  for (const std::string kind : {"long", "short"}) {
    const Outcome built = build(kind, kind + "-store", {"--min-tokens", "2", "--valid-fraction", "0.3"});
    ASSERT_EQ(built.exit_code, 0) << built.err;
    const Outcome run =
        tessera({"train", path("run.toml"), "--run.dir", path(kind + "-run"), "--data.store", path(kind + "-store")});
    EXPECT_EQ(run.exit_code, 0) << kind << ": " << run.err;
    EXPECT_TRUE(std::isfinite(last_loss(path(kind + "-run")))) << kind;
  }
}

TEST_F(BadInput, DamagedCheckpoint) {
  const std::string good = path("run/checkpoints/step-000000000012");
  const ckpt::Manifest manifest = ckpt::inspect(good).manifest;
  const ckpt::TensorRecord* head = manifest.find("lm_head.weight");
  ASSERT_NE(head, nullptr);
  const std::string file = manifest.files[size_t(head->file)].path;
  fs::copy(good, path("flipped"), fs::copy_options::recursive);
  std::string bytes = read_file(path("flipped/" + file));
  bytes[size_t(head->offset + head->bytes / 2)] ^= 1;
  write_file(path("flipped/" + file), bytes);
  fs::copy(good, path("cut"), fs::copy_options::recursive);
  fs::resize_file(path("cut/" + file), 5000);
  fs::copy(good, path("unfinished"), fs::copy_options::recursive);
  fs::remove(path("unfinished/COMMITTED"));
  check({
      {"flipped, generate", {"generate", path("flipped")}, {"flipped", "is damaged", "lm_head.weight"}},
      {"flipped, eval", {"eval", path("flipped")}, {"flipped", "is damaged", "lm_head.weight"}},
      {"cut, generate", {"generate", path("cut")}, {"cut", "has 5000 bytes", "truncated"}},
      {"cut, eval", {"eval", path("cut")}, {"cut", "has 5000 bytes", "truncated"}},
      {"cut, inspect", {"ckpt", "inspect", path("cut")}, {"cut", "has 5000 bytes", "truncated"}},
      {"never completed", {"generate", path("unfinished")}, {"unfinished", "no COMMITTED file"}},
  });
  const Outcome flipped = tessera({"ckpt", "verify", path("flipped"), "--json"});
  EXPECT_EQ(flipped.exit_code, 1);
  EXPECT_EQ(flipped.err, "");
  const json verification = json::parse(flipped.out);
  EXPECT_EQ(verification.at("pass"), false);
  ASSERT_EQ(verification.at("bad").size(), 1u);
  EXPECT_EQ(verification["bad"][0].at("tensor"), "lm_head.weight");
  const Outcome cut = tessera({"ckpt", "verify", path("cut")});
  EXPECT_EQ(cut.exit_code, 1);
  EXPECT_NE(cut.out.find("has 5000 bytes"), std::string::npos) << cut.out;
}

TEST_F(BadInput, PlacesThatCannotBeWritten) {
  Words below_a_file = train(), below_proc = train(), store = {"data", "build", path("text"), "--out"};
  below_a_file[3] = path("run.toml/below");
  below_proc[3] = "/proc/tessera-run";
  store.push_back(path("run.toml/below"));
  check({
      {"below a file", below_a_file, {"cannot create directory", "run.toml/below", "Not a directory"}},
      {"/proc", below_proc, {"cannot create directory", "/proc/tessera-run"}},
      {"store below a file", store, {"run.toml/below"}},
  });
  Tmpfs disk(path("read-only"), "size=1m");
  if (!disk.mounted() || !disk.make_read_only()) GTEST_SKIP() << "a read-only mount needs root";
  Words read_only = train();
  read_only[3] = path("read-only/run");
  check({{"read-only disk", read_only, {"no permission", "read-only/run", "Read-only file system"}}});
}

TEST_F(BadInput, FullDisk) {
  Tmpfs disk(path("disk"), "size=8m");
  if (!disk.mounted()) GTEST_SKIP() << "a small disk to fill needs root, for mount";
  const Words run{"train", path("run.toml"), "--run.dir", path("disk/run")};
  const Outcome first = tessera(run);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  const auto before = tree_of(path("disk/run/checkpoints"));
  Words longer = run;
  longer.insert(longer.end(), {"--train.steps", "20", "--checkpoint.every", "0"});

  // Room for the rows and files of the run, not for a checkpoint.
  const auto fill = [&](uint64_t left) {
    write_file(path("disk/filler"), std::string(fs::space(path("disk")).available - left, 'x'));
  };
  fill(200 << 10);
  expect_refused(tessera(longer), {"disk full", "step-000000000020"});
  EXPECT_EQ(tree_of(path("disk/run/checkpoints")), before);
  EXPECT_TRUE(ckpt::verify(path("disk/run/checkpoints/step-000000000012")).pass);

  // Checkpoints on the way are given up with a warning, the run goes on.
  Words often = longer;
  often.back() = "4";
  const Outcome warned = tessera(often);
  expect_refused(warned, {"disk full"});
  EXPECT_NE(warned.err.find("step 16: no checkpoint: disk full"), std::string::npos) << warned.err;

  fs::remove(path("disk/filler"));
  fill(0);
  expect_refused(tessera(longer), {"disk full"});
  EXPECT_EQ(tree_of(path("disk/run/checkpoints")), before);

  fs::remove(path("disk/filler"));
  const Outcome last = tessera(longer);
  EXPECT_EQ(last.exit_code, 0) << last.err;
  EXPECT_NE(last.out.find("resumed from step 12"), std::string::npos) << last.out;
}

TEST_F(BadInput, TokensOutsideTheVocabulary) {
  int32_t ids[] = {5, 6, 900, 7};
  const View view(ids, DType::i32, {4});
  ckpt::write_safetensors(path("ids.safetensors"), std::vector<ckpt::TensorRef>{{"ids", view}});
  ckpt::write_safetensors(path("named.safetensors"), std::vector<ckpt::TensorRef>{{"tokens", view}});
  const auto parity = [&](const std::string& file) {
    return Words{"eval", path("run"), "--ids", path(file), "--logits", path("logits.safetensors")};
  };
  check({
      {"bad id", parity("ids.safetensors"), {"id 900 at position 2", "vocabulary of 272"}},
      {"no ids", parity("named.safetensors"), {"named.safetensors", "ids"}},
      {"no file", parity("nowhere.safetensors"), {"nowhere.safetensors", "No such file"}},
      {"nothing to write", {"eval", path("run"), "--ids", path("ids.safetensors")}, {"--logits FILE or --grads FILE"}},
  });
  fs::copy(path("store"), path("edited"), fs::copy_options::recursive);
  std::string tokens = read_file(path("edited/train/tokens-000.bin"));
  for (size_t i = 0; i < tokens.size(); i += 256) tokens[i] = tokens[i + 1] = '\xff';
  write_file(path("edited/train/tokens-000.bin"), tokens);
  check({{"edited store",
          train({"--data.store", path("edited")}),
          {"tokens-000.bin", "token id 65535", "vocabulary of 272", "build it again"}}});
  const Outcome verified = tessera({"data", "inspect", path("edited"), "--verify", "--json"});
  EXPECT_EQ(verified.exit_code, 1) << verified.err;
  EXPECT_FALSE(json::parse(verified.out).at("faults").empty());
}

// The published tiny model with its tensors changed as told.
void write_changed_weights(const std::string& to) {
  const ckpt::SafetensorsFile file(source_path("tests/data/kimi-linear-tiny/hf-model.safetensors"));
  std::vector<std::vector<float>> storage;
  std::vector<ckpt::TensorRef> tensors;
  for (const ckpt::TensorInfo& t : file.tensors()) {
    storage.push_back(file.read_f32(t.name));
    std::string name = t.name;
    std::vector<int64_t> shape = t.shape;
    if (name == "lm_head.weight") name = "model.extra.weight";
    if (name == "model.embed_tokens.weight") std::swap(shape[0], shape[1]);
    tensors.push_back({name, View(storage.back().data(), DType::f32, Shape(std::span<const int64_t>(shape)))});
  }
  ckpt::write_safetensors(to, tensors);
}

TEST_F(BadInput, Import) {
  const std::string config = source_path("tests/data/kimi-linear-tiny/hf-config.json");
  const json whole = json::parse(read_file(config));
  const auto changed = [&](const std::string& name, const json& patch) {
    json c = whole;
    c.merge_patch(patch);
    write_file(path(name), c.dump());
    return Words{"ckpt", "import", path(name)};
  };
  const json published = json::parse(read_file(source_path("tests/data/kimi-linear-config.json")));
  const auto with_kda_layers = [&](const std::string& name, int64_t from, int64_t to) {
    json c = published;
    for (json& layer : c["linear_attn_config"]["kda_layers"]) layer = layer == from ? to : layer.get<int64_t>();
    write_file(path(name), c.dump());
    return Words{"ckpt", "import", path(name)};
  };
  const auto with_mlps = [&](const std::string& name, const std::vector<std::string>& kinds) {
    return changed(name, {{"mlp_layer_types", kinds}});
  };
  write_changed_weights(path("changed.safetensors"));
  write_file(path("text.safetensors"), "this is no safetensors file");
  write_file(path("broken.json"), "{");
  const auto weights = [&](const std::string& file) {
    return Words{"ckpt", "import", config, "--weights", path(file), "--out", path("imported")};
  };
  check({
      {"missing, misshapen and extra tensors",
       weights("changed.safetensors"),
       {"3 tensors do not fit", "lm_head.weight: missing", "model.embed_tokens.weight: shape (64, 97), wanted (97, 64)",
        "model.extra.weight: not a tensor of this model"}},
      {"not safetensors", weights("text.safetensors"), {"text.safetensors"}},
      {"no weights", weights("nowhere.safetensors"), {"nowhere.safetensors"}},
      {"needed key left out", changed("less.json", {{"kv_lora_rank", nullptr}}), {"\"kv_lora_rank\" is missing"}},
      {"key of another kind", changed("kind.json", {{"hidden_size", "wide"}}), {"\"hidden_size\"", "\"wide\""}},
      {"name of another kind", changed("name.json", {{"model_type", 3}}), {"\"model_type\"", "3"}},
      {"number out of range", changed("negative.json", {{"hidden_size", -3}}), {"\"hidden_size\" is -3", "from 1"}},
      {"experts out of range", changed("topk.json", {{"num_experts_per_token", 9}}), {"moe.top_k is 9"}},
      {"layer in both lists",
       with_kda_layers("both.json", 3, 4),
       {"both.json", "name layer 4 twice", "in one of them"}},
      {"layer that is not there", with_kda_layers("beyond.json", 3, 28), {"name layer 28", "from 1 to 27"}},
      {"unknown MLP", with_mlps("moe.json", {"dense", "sparse", "moe", "sparse"}), {"3 is \"moe\"", "or \"sparse\""}},
      {"MLP of too few layers", with_mlps("few.json", {"dense", "sparse"}), {"2 entries for 4 layers"}},
      {"dense MLP among sparse ones",
       with_mlps("mixed.json", {"dense", "sparse", "dense", "sparse"}),
       {"layer 3 is dense after a sparse one", "begin with the dense"}},
      {"not JSON", {"ckpt", "import", path("broken.json")}, {"broken.json", "not a JSON object"}},
      {"no such file", {"ckpt", "import", path("nowhere.json")}, {"nowhere.json", "cannot open", "check the path"}},
      {"weights without a place", {"ckpt", "import", config, "--weights", path("changed.safetensors")}, {"--out"}},
  });
}

TEST_F(BadInput, SecondRunInTheSameDirectory) {
  const Words run{"train", path("run.toml"), "--run.dir", path("shared"), "--train.steps", "100000"};
  const pid_t first = start_tessera(run);
  while (read_file(path("shared/metrics.jsonl")).find("\"step\":1,") == std::string::npos) {
    ASSERT_EQ(waitpid(first, nullptr, WNOHANG), 0) << "the first run ended";
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  expect_refused(tessera(run), {"checkpoints/.lock is held by", fmt::format("pid {}", first), "another directory"});
  kill(first, SIGTERM);
  int status = 0;
  waitpid(first, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace tessera::test
