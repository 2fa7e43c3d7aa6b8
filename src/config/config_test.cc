#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>

#include "config/nearest.h"
#include "config/options.h"

namespace tessera::config {
namespace {

enum class Kind { muon, adamw };

struct Part {
  int64_t count = 1;
};

struct Source {
  std::string path = "none";
  double weight = 1.0;
  std::vector<Part> parts;
};

struct Settings {
  int64_t seed = 7;
  int64_t steps = 100;
  double learning_rate = 3e-4;
  bool resume = true;
  std::string name = "nano";
  Kind kind = Kind::muon;
  std::vector<std::string> tags = {"a", "b"};
  std::vector<int64_t> lengths = {128, 256};
  int64_t any = 0;
  std::vector<Source> sources;
};

class ConfigTest : public testing::Test {
 protected:
  void SetUp() override { bind(options, settings); }

  static void bind(Options& options, Settings& s) {
    options.add("seed", &s.seed, "random seed");
    options.add("train.steps", &s.steps, "optimizer steps", at_least(1));
    options.add("train.resume", &s.resume, "continue from the newest checkpoint");
    options.add("train.optim.learning_rate", &s.learning_rate, "peak learning rate", above(0));
    options.add_choice<Kind>("train.optim.kind", &s.kind, {{"muon", Kind::muon}, {"adamw", Kind::adamw}}, "optimizer");
    options.add("run.name", &s.name, "name of the run");
    options.add("run.tags", &s.tags, "labels");
    options.add("data.lengths", &s.lengths, "context lengths", between(1, 1 << 20));
    options.add("data.any", &s.any, "an integer without limits");
    options.add_tables("data.source", &s.sources, "a corpus", [](Options& o, Source& source) {
      o.add("path", &source.path, "file or directory");
      o.add("weight", &source.weight, "share in the mixture", at_least(0));
      o.add_tables("part", &source.parts, "a part",
                   [](Options& p, Part& part) { p.add("count", &part.count, "copies", at_least(0)); });
    });
  }

  std::string error_of(const std::string& toml) {
    try {
      options.load_text(toml, "run.toml");
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  }

  std::string set_error(const std::string& key, const std::string& text) {
    try {
      options.set(key, text);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  }

  Settings settings;
  Options options;
};

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Nearest, DistancesAndWords) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("setps", "steps"), 1);  // neighbours swapped
  const std::vector<std::string> known = {"steps", "seed", "save"};
  EXPECT_EQ(nearest("setps", known), "steps");
  EXPECT_EQ(nearest("sed", known), "seed");
  EXPECT_EQ(nearest("gradient", known), "");
  EXPECT_EQ(nearest("x", std::vector<std::string>{}), "");
  EXPECT_EQ(did_you_mean(""), "");
}

TEST_F(ConfigTest, ReadsEveryType) {
  options.load_text(R"(
seed = -9223372036854775808   # the smallest
[train]
steps = 1_000
resume = false
optim = { learning_rate = 1, kind = "adamw" }
[run]
name = "häm \"q\" \u00e9 \t"
tags = []
[data]
lengths = [1, 2,
  3]
any = 9223372036854775807
[[data.source]]
path = "a"
weight = 2
[[data.source.part]]
count = 5
[[data.source]]
path = "b"
)",
                    "run.toml");
  EXPECT_EQ(settings.seed, std::numeric_limits<int64_t>::min());
  EXPECT_EQ(settings.any, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(settings.steps, 1000);
  EXPECT_FALSE(settings.resume);
  EXPECT_EQ(settings.learning_rate, 1.0);
  EXPECT_EQ(settings.kind, Kind::adamw);
  EXPECT_EQ(settings.name, "häm \"q\" é \t");
  EXPECT_TRUE(settings.tags.empty());
  EXPECT_EQ(settings.lengths, (std::vector<int64_t>{1, 2, 3}));
  ASSERT_EQ(settings.sources.size(), 2u);
  EXPECT_EQ(settings.sources[0].weight, 2.0);
  ASSERT_EQ(settings.sources[0].parts.size(), 1u);
  EXPECT_EQ(settings.sources[0].parts[0].count, 5);
  EXPECT_EQ(settings.sources[1].path, "b");
  EXPECT_EQ(settings.sources[1].weight, 1.0);
  EXPECT_TRUE(options.is_set("train.steps"));
  EXPECT_TRUE(options.is_set("data.source"));
}

TEST_F(ConfigTest, EmptyFileLeavesDefaults) {
  const std::string before = options.dump();
  options.load_text("", "run.toml");
  options.load_text("# only a comment\n[train]\n", "run.toml");
  EXPECT_EQ(options.dump(), before);
  EXPECT_FALSE(options.is_set("train.steps"));
  EXPECT_FALSE(options.is_set("data.source"));
  EXPECT_THROW(options.is_set("no.such.key"), Error);
}

TEST_F(ConfigTest, UnknownKeyNamesLineAndNearest) {
  EXPECT_EQ(
      error_of("seed = 1\n[train]\n\nsetps = 5\n"),
      "run.toml:4: unknown key 'train.setps'; did you mean 'train.steps'? (known keys of [train]: steps, resume)");
  EXPECT_CONTAINS(error_of("steps = 5\n"),
                  "run.toml:1: unknown key 'steps'; did you mean 'train.steps'? (known keys at the top: seed)");
  EXPECT_EQ(error_of("[train]\nzzzzzzz = 5\n"),
            "run.toml:2: unknown key 'train.zzzzzzz' (known keys of [train]: steps, resume)");
  EXPECT_CONTAINS(error_of("\n[trian]\nsteps = 5\n"),
                  "run.toml:2: unknown table [trian]; did you mean [train]? (known tables: ");
  EXPECT_CONTAINS(error_of("\"train.steps\" = 5\n"), "run.toml:1: unknown key \"train.steps\"");
}

TEST_F(ConfigTest, ReportsTheFirstMistakeOfTheFile) {
  EXPECT_CONTAINS(error_of("zz = 1\naa = 2\n"), "run.toml:1: unknown key 'zz'");
}

TEST_F(ConfigTest, UnknownKeyInAList) {
  EXPECT_EQ(error_of("[[data.source]]\npath = 'a'\n[[data.source]]\nwieght = 1\n"),
            "run.toml:4: unknown key 'data.source.1.wieght'; did you mean 'data.source.1.weight'? "
            "(known keys of [data.source.1]: path, weight, part)");
  EXPECT_CONTAINS(error_of("[[data.source]]\n[[data.source.part]]\ncuont = 1\n"), "'data.source.0.part.0.cuont'");
}

TEST_F(ConfigTest, WrongTypesNameFoundAndWanted) {
  EXPECT_EQ(error_of("[train]\nsteps = \"ten\"\n"),
            "run.toml:2: train.steps: found the string \"ten\", wanted an integer, at least 1 (optimizer steps)");
  EXPECT_CONTAINS(error_of("[train]\nsteps = \"10\"\n"), "; write it without quotes");
  EXPECT_CONTAINS(error_of("[train]\nsteps = 1e6\n"),
                  "found the number 1000000.0, wanted an integer, at least 1; "
                  "write 1000000 (");
  EXPECT_CONTAINS(error_of("[train]\nsteps = 1.5\n"), "found the number 1.5, wanted an integer, at least 1 (");
  EXPECT_CONTAINS(error_of("[train]\nresume = 1\n"), "found the integer 1, wanted true or false");
  EXPECT_CONTAINS(error_of("[train.optim]\nlearning_rate = true\n"), "found the value true, wanted a number, above 0");
  EXPECT_CONTAINS(error_of("[run]\nname = 5\n"), "wanted a string in quotes");
  EXPECT_CONTAINS(error_of("[run]\ntags = \"a\"\n"), "wanted a list of strings");
  EXPECT_CONTAINS(error_of("[run]\ntags = [\"a\", 3]\n"), "found the integer 3, wanted a list of strings");
  EXPECT_CONTAINS(error_of("[run]\nname = 1979-05-27\n"), "found a date or time");
  EXPECT_CONTAINS(error_of("[train.steps]\n"), "run.toml:1: train.steps: found a table, wanted an integer");
  EXPECT_CONTAINS(error_of("train = 5\n"), "run.toml:1: train: found the integer 5, wanted a table: [train]");
  EXPECT_CONTAINS(error_of("[data.source]\npath = 'a'\n"),
                  "data.source: found a table, wanted a list of tables: [[data.source]] in double brackets");
  EXPECT_CONTAINS(error_of("data.source = [1]\n"), "found a list of 1 values, wanted a list of tables");
  const std::string long_name = "[train]\nsteps = \"" + std::string(59, 'x') + "é" + std::string(500, 'y') + "\"\n";
  EXPECT_CONTAINS(error_of(long_name), "xxx\"... of 561 bytes");
}

TEST_F(ConfigTest, OutOfRange) {
  EXPECT_EQ(error_of("[train]\nsteps = 0\n"),
            "run.toml:2: train.steps: found the integer 0, wanted an integer, at least 1 (optimizer steps)");
  EXPECT_CONTAINS(error_of("[train.optim]\nlearning_rate = 0\n"), "found the integer 0, wanted a number, above 0");
  EXPECT_CONTAINS(error_of("[train.optim]\nlearning_rate = nan\n"), "found the number nan, wanted a number, above 0");
  EXPECT_CONTAINS(error_of("[data]\nlengths = [4, -1]\n"),
                  "found the integer -1, wanted a list of integers, from 1 to 1048576");
  EXPECT_CONTAINS(error_of("[train.optim]\nkind = \"adamq\"\n"),
                  "wanted one of \"muon\", \"adamw\"; did you mean 'adamw'?");
}

TEST_F(ConfigTest, SyntaxErrorsNameLineAndColumn) {
  EXPECT_CONTAINS(error_of("seed = 1\n[train\nsteps = 5\n"), "run.toml:2:7: not valid TOML: ");
  EXPECT_CONTAINS(error_of("seed = 1\nseed = 2\n"), "run.toml:2:");
  EXPECT_CONTAINS(error_of("seed = 9223372036854775808\n"), "run.toml:1:");
  EXPECT_CONTAINS(error_of("[run]\nname = \"\xff\"\n"), "run.toml:2:");
}

TEST_F(ConfigTest, CommandLineWinsOverFiles) {
  options.set("train.steps", "20");
  options.load_text("[train]\nsteps = 5\nresume = false\n", "run.toml");
  EXPECT_EQ(settings.steps, 20);
  EXPECT_FALSE(settings.resume);
  options.set("train.resume", "true");
  EXPECT_TRUE(settings.resume);
  options.set("data.any", "-3");
  EXPECT_EQ(settings.any, -3);
  options.set("train.optim.learning_rate", "1e-3");
  EXPECT_EQ(settings.learning_rate, 1e-3);
  options.set("train.optim.kind", "adamw");
  EXPECT_EQ(settings.kind, Kind::adamw);
  options.set("run.name", "5 \"x\"");
  EXPECT_EQ(settings.name, "5 \"x\"");
  options.set("run.tags", "x,y z");
  EXPECT_EQ(settings.tags, (std::vector<std::string>{"x", "y z"}));
  options.set("run.tags", "[\"p,q\"]");
  EXPECT_EQ(settings.tags, (std::vector<std::string>{"p,q"}));
  options.set("run.tags", "");
  EXPECT_TRUE(settings.tags.empty());
  options.set("data.lengths", "16,32");
  EXPECT_EQ(settings.lengths, (std::vector<int64_t>{16, 32}));
  EXPECT_CONTAINS(error_of("[train]\nsteps = 0\n"), "run.toml:2");  // overridden, and still checked
}

TEST_F(ConfigTest, CommandLineReachesIntoLists) {
  options.load_text("[[data.source]]\npath = 'a'\n[[data.source]]\npath = 'b'\n[[data.source.part]]\n", "run.toml");
  options.set("data.source.1.weight", "0.5");
  EXPECT_EQ(settings.sources[1].weight, 0.5);
  EXPECT_EQ(settings.sources[0].weight, 1.0);
  options.set("data.source.1.part.0.count", "9");
  EXPECT_EQ(settings.sources[1].parts[0].count, 9);
  EXPECT_CONTAINS(set_error("data.source.2.weight", "1"),
                  "command line: data.source.2.weight: the list has 2 tables, wanted data.source.I.path with I from 0");
  EXPECT_CONTAINS(set_error("data.source.x.weight", "1"), "the list has 2 tables");
  EXPECT_CONTAINS(set_error("data.source.1", "1"), "the list has 2 tables");
  EXPECT_CONTAINS(set_error("data.source", "1"), "set one field of one table, such as data.source.0.path");
  EXPECT_CONTAINS(set_error("data.source.0.wieght", "1"), "did you mean 'data.source.0.weight'?");
}

TEST_F(ConfigTest, CommandLineErrors) {
  EXPECT_EQ(
      set_error("train.setps", "5"),
      "command line: unknown key 'train.setps'; did you mean 'train.steps'? (known keys of [train]: steps, resume)");
  EXPECT_EQ(set_error("train.steps", "ten"),
            "command line: train.steps: found 'ten', wanted an integer, at least 1 (optimizer steps)");
  EXPECT_CONTAINS(set_error("train.steps", "0"), "command line: train.steps: found the integer 0, wanted");
  EXPECT_CONTAINS(set_error("train.steps", ""), "found '', wanted an integer");
  EXPECT_CONTAINS(set_error("train.steps", "5\nx = 2"), "wanted an integer");
  EXPECT_CONTAINS(set_error("run.name", "\xff"), "wanted a string");
  EXPECT_CONTAINS(set_error("train.optim.kind", "mun"), "did you mean 'muon'?");
  EXPECT_CONTAINS(set_error("trian.steps", "5"), "did you mean 'train.steps'?");
  EXPECT_EQ(settings.steps, 100);
}

TEST_F(ConfigTest, DumpReadsBackToTheSameDump) {
  options.load_text(R"(
seed = -3
train = { steps = 5, optim = { learning_rate = 0.1 } }
run = { name = "ü\\\"\n\u0001\u007f", tags = ["x", "y\"z"] }
data.source = [{ path = "p", weight = 1e300, part = [{ count = 2 }, {}] }, { weight = 5e-324 }]
)",
                    "run.toml");
  const std::string dump = options.dump();
  Settings again;
  Options second;
  bind(second, again);
  second.load_text(dump, "dump.toml");
  EXPECT_EQ(second.dump(), dump);
  EXPECT_EQ(again.name, settings.name);
  EXPECT_EQ(again.learning_rate, 0.1);
  EXPECT_EQ(again.sources[1].weight, 5e-324);
  ASSERT_EQ(again.sources[0].parts.size(), 2u);
  EXPECT_EQ(again.sources[0].parts[0].count, 2);
  EXPECT_CONTAINS(dump, "[train]\n# optimizer steps (at least 1)\nsteps = 5\n");
  EXPECT_CONTAINS(dump, "# optimizer (muon, adamw)\nkind = \"muon\"\n");
  EXPECT_EQ(dump.find("random seed"), 2u);  // keys without a table come first
}

TEST_F(ConfigTest, DumpOfAnEmptyListOverridesADefaultOne) {
  settings.sources.resize(2);
  options.load_text("data.source = []\n", "run.toml");
  const std::string dump = options.dump();
  Settings again;
  again.sources.resize(2);
  Options second;
  bind(second, again);
  second.load_text(dump, "dump.toml");
  EXPECT_TRUE(again.sources.empty());
  EXPECT_EQ(second.dump(), dump);
}

TEST_F(ConfigTest, KeysListTypesDefaultsAndHelp) {
  options.set("train.steps", "5");
  const std::vector<KeyInfo> keys = options.keys();
  ASSERT_EQ(keys.size(), 12u);
  EXPECT_EQ(keys[1].key, "train.steps");
  EXPECT_EQ(keys[1].type, "integer");
  EXPECT_EQ(keys[1].default_value, "100");
  EXPECT_EQ(keys[1].help, "optimizer steps (at least 1)");
  EXPECT_EQ(keys[9].key, "data.source.N.path");
  EXPECT_EQ(keys[9].default_value, "\"none\"");
  EXPECT_EQ(keys[11].key, "data.source.N.part.N.count");
}

TEST_F(ConfigTest, RegistrationRulesHold) {
  EXPECT_THROW(options.add("seed", &settings.seed, "twice"), Error);
  EXPECT_THROW(options.add("train", &settings.any, "a table already"), Error);
  EXPECT_THROW(options.add("seed.x", &settings.any, "inside a value"), Error);
  EXPECT_THROW(options.add("a b", &settings.any, "needs quotes"), Error);
  EXPECT_THROW(options.add("fresh", &settings.any, "default out of range", at_least(1)), Error);
}

class ConfigFileTest : public ConfigTest {
 protected:
  void SetUp() override {
    ConfigTest::SetUp();
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera_config_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory); }

  void write(const std::string& name, const std::string& text) { std::ofstream(directory / name) << text; }
  std::string load_error(const std::string& name) {
    try {
      options.load_file((directory / name).string());
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  }

  std::filesystem::path directory;
};

TEST_F(ConfigFileTest, FilesAndWhatIsNearThem) {
  EXPECT_CONTAINS(load_error("run.toml"), "No such file or directory");
  EXPECT_CONTAINS(load_error("run.toml"), "holds no .toml file");
  write("run.toml", "[train]\nsteps = 3\n");
  write("empty.toml", "");
  write("bad.toml", "\n[train]\nstep = 3\n");
  EXPECT_EQ(load_error("run.toml"), "no error");
  EXPECT_EQ(load_error("empty.toml"), "no error");
  EXPECT_EQ(settings.steps, 3);
  EXPECT_CONTAINS(load_error("rum.toml"), "rum.toml'");
  EXPECT_CONTAINS(load_error("rum.toml"), "; did you mean 'run.toml'? (");
  EXPECT_CONTAINS(load_error("rum.toml"), "holds bad.toml, empty.toml, run.toml)");
  EXPECT_CONTAINS(load_error("no/run.toml"), "there is no directory");
  EXPECT_CONTAINS(load_error("."), "is a directory, wanted a TOML file");
  EXPECT_CONTAINS(load_error("bad.toml"), "/bad.toml:3: unknown key 'train.step'");
}

}  // namespace
}  // namespace tessera::config
