// Building stores from files, and reading them back, also when they are damaged.
#include "data/build.h"

#include <sys/resource.h>

#include <csignal>

#include "core/file.h"
#include "core/parallel.h"
#include "data/sentencepiece.h"
#include "data/test_support.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

class BuildTest : public ScratchTest {
 protected:
  // 200 documents of different lengths, one of them twice, one too short.
  BuildOptions corpus() const {
    for (int i = 0; i < 200; ++i) {
      std::string text = "document " + std::to_string(i) + " of the corpus\n";
      for (int line = 0; line < i; ++line) text += "line " + std::to_string(line * i) + " caf\xC3\xA9\n";
      write("in/" + std::to_string(1000 + i) + ".txt", text);
    }
    write("in/copy.txt", read_file(path("in/1007.txt")));
    write("in/tiny.txt", "tiny");
    BuildOptions options;
    options.inputs = {{path("in"), Kind::automatic, "text", false}};
    options.out = path("out");
    options.valid_fraction = 0.1;
    return options;
  }

  std::map<std::string, std::string> contents(const std::string& directory) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(path(directory))) {
      if (entry.is_regular_file()) files[entry.path().lexically_relative(path(directory))] = read_file(entry.path());
    }
    return files;
  }

  std::vector<std::string> names_in_root() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
};

TEST_F(BuildTest, RoundTrip) {
  const BuildSummary summary = build_store(corpus());
  EXPECT_EQ(summary.import.files, 202);
  EXPECT_EQ(summary.duplicates, 1);
  EXPECT_EQ(summary.too_short, 1);
  EXPECT_EQ(summary.train.documents + summary.valid.documents, 200);
  EXPECT_GT(summary.valid.documents, 5);
  EXPECT_LT(summary.valid.documents, 45);

  const auto tokenizer = load_store_tokenizer(path("out"));
  int64_t found = 0, previous = -1;
  for (const char* split : {"/train", "/valid"}) {
    const Store store(path("out") + split);
    EXPECT_TRUE(store.verify().empty());
    previous = -1;
    int64_t tokens = 0, text_bytes = 0, histogram = 0;
    for (int64_t doc = 0; doc < store.documents(); ++doc) {
      std::vector<int32_t> ids = store.read(doc);
      EXPECT_EQ(ids.back(), tokenizer->eos_id());
      const std::string text = tokenizer->decode(ids);
      const int64_t number = std::stoll(text.substr(9));
      EXPECT_GT(number, previous);  // input order
      previous = number;
      EXPECT_EQ(text, read_file(path("in/" + std::to_string(1000 + number) + ".txt")));
      EXPECT_EQ(store.document(doc).text_bytes, int64_t(text.size()));
      tokens += store.length(doc);
      text_bytes += int64_t(text.size());
      ++found;
    }
    for (const int64_t count : store.meta().histogram) histogram += count;
    EXPECT_EQ(histogram, store.documents());
    EXPECT_EQ(store.meta().tokens, tokens);
    EXPECT_EQ(store.meta().text_bytes, text_bytes);
  }
  EXPECT_EQ(found, 200);
}

TEST_F(BuildTest, BytesDoNotDependOnThreadsOrShardsOnDocuments) {
  BuildOptions options = corpus();
  const int threads = thread_count();
  for (const int count : {1, 2, 5}) {
    set_thread_count(count);
    options.out = path("out" + std::to_string(count));
    build_store(options);
  }
  set_thread_count(threads);
  EXPECT_EQ(contents("out1"), contents("out2"));
  EXPECT_EQ(contents("out1"), contents("out5"));
  options.out = path("sharded");
  options.shard_bytes = 20'000;
  build_store(options);
  const Store whole(path("out1/train")), sharded(path("sharded/train"));
  EXPECT_GT(sharded.meta().files.size(), 5u);
  EXPECT_TRUE(sharded.verify().empty());
  ASSERT_EQ(whole.documents(), sharded.documents());
  for (int64_t doc = 0; doc < whole.documents(); ++doc) EXPECT_EQ(whole.read(doc), sharded.read(doc));
}

TEST_F(BuildTest, SplitOfADocumentIsStable) {
  const auto texts = [this](const std::string& out) {
    const Store store(path(out + "/valid"));
    std::set<std::string> found;
    for (int64_t doc = 0; doc < store.documents(); ++doc) found.insert(make_byte_tokenizer()->decode(store.read(doc)));
    return found;
  };
  BuildOptions options = corpus();
  build_store(options);
  for (int i = 0; i < 50; ++i) {  // more documents, in front of the others
    write("in/0" + std::to_string(i) + ".txt", "another document with number " + std::to_string(i));
  }
  options.out = path("more");
  build_store(options);
  const std::set<std::string> before = texts("out"), after = texts("more");
  for (const std::string& text : before) EXPECT_TRUE(after.contains(text));
  EXPECT_GT(after.size(), before.size());
}

TEST_F(BuildTest, SameBuildIsUpToDate) {
  BuildOptions options = corpus();
  const BuildSummary first = build_store(options);
  EXPECT_FALSE(first.up_to_date);
  const auto time = fs::last_write_time(path("out/build.json"));
  const BuildSummary second = build_store(options);
  EXPECT_TRUE(second.up_to_date);
  EXPECT_EQ(second.describe(), first.describe());
  EXPECT_EQ(fs::last_write_time(path("out/build.json")), time);

  options.min_tokens = 100;
  EXPECT_CONTAINS(user_error([&] { build_store(options); }), "other inputs or options");
  options.replace = true;
  EXPECT_FALSE(build_store(options).up_to_date);
  EXPECT_EQ(names_in_root(), (std::vector<std::string>{"in", "out"}));
}

TEST_F(BuildTest, NeverTouchesADirectoryOfOthers) {
  BuildOptions options = corpus();
  write("out/precious.txt", "mine");
  options.replace = true;
  EXPECT_CONTAINS(user_error([&] { build_store(options); }), "not the output of a data build");
  EXPECT_EQ(read_file(path("out/precious.txt")), "mine");
  options.out = path("in/store");
  EXPECT_CONTAINS(user_error([&] { build_store(options); }), "inside the input directory");
  const fs::path before = fs::current_path();
  fs::current_path(root_ + "/in");
  options.out = "new/store";
  EXPECT_CONTAINS(user_error([&] { build_store(options); }), "inside the input directory");
  fs::current_path(before);
}

TEST_F(BuildTest, EmptyCorpusSaysWhy) {
  write("in/a.txt", "caf\xE9");
  write("in/b.txt", "");
  write("in/c.txt", "short");
  BuildOptions options;
  options.inputs = {{path("in"), Kind::automatic, "text", false}};
  options.out = path("out");
  const std::string message = user_error([&] { build_store(options); });
  EXPECT_CONTAINS(message, "3 files");
  EXPECT_CONTAINS(message, "dropped 1 (not UTF-8): a.txt");
  EXPECT_CONTAINS(message, "dropped 1 (empty): b.txt");
  EXPECT_CONTAINS(message, "too short (under 16 tokens): 1");
  EXPECT_EQ(names_in_root(), std::vector<std::string>{"in"});
  EXPECT_CONTAINS(user_error([] { build_store({}); }), "no inputs");
  options.valid_fraction = 1;
  EXPECT_CONTAINS(user_error([&] { build_store(options); }), "valid_fraction 1");
}

TEST_F(BuildTest, OneDocumentGivesItsEndToValidation) {
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "verse " + std::to_string(i) + "\n";
  BuildOptions options;
  options.inputs = {{write("book.txt", text), Kind::automatic, "text", false}};
  options.out = path("out");
  options.valid_fraction = 0.05;
  const BuildSummary summary = build_store(options);
  EXPECT_TRUE(summary.held_out_tail);
  const auto bytes = make_byte_tokenizer();
  const std::string head = bytes->decode(Store(path("out/train")).read(0));
  const std::string tail = bytes->decode(Store(path("out/valid")).read(0));
  EXPECT_EQ(head + tail, text);
  EXPECT_TRUE(head.ends_with('\n'));
  EXPECT_NEAR(double(tail.size()) / double(text.size()), 0.05, 0.002);
  options.out = path("without");
  options.valid_fraction = 0;
  EXPECT_EQ(build_store(options).valid.documents, 0);
}

TEST_F(BuildTest, FailedWritingLeavesNothing) {
  const BuildOptions options = corpus();
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit tight{10'000, old.rlim_max};  // as a full disk: write fails after 10,000 bytes of a file
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const std::string message = user_error([&] { build_store(options); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_CONTAINS(message, "file too large: cannot write");
  EXPECT_CONTAINS(message, "tokens-000.bin");
  EXPECT_EQ(names_in_root(), std::vector<std::string>{"in"});
}

TEST_F(BuildTest, AbandonedPartsAreRemoved) {
  fs::create_directories(path("out.partial-999999999"));  // above any process number
  fs::create_directories(path("out.partial-1"));          // a process that runs
  build_store(corpus());
  EXPECT_EQ(names_in_root(), (std::vector<std::string>{"in", "out", "out.partial-1"}));
}

TEST_F(BuildTest, SourceFilesCarryTheSeparatorAndVendoredCopiesAreDropped) {
  write("src/a.c", "int first_function(void) { return 1; }\n");
  write("src/vendor/a.c", "int first_function(void) { return 1; }\n");
  BuildOptions options;
  options.inputs = {{path("src"), Kind::source, "text", false}};
  options.out = path("out");
  options.valid_fraction = 0;
  EXPECT_EQ(build_store(options).duplicates, 1);
  const Store store(path("out/train"));
  const std::vector<int32_t> ids = store.read(0);
  EXPECT_EQ(ids[0], make_byte_tokenizer()->specials().file_sep);
  EXPECT_EQ(make_byte_tokenizer()->decode(ids), "a.c\nint first_function(void) { return 1; }\n");
  EXPECT_EQ(store.document(0).text_bytes, int64_t(ids.size()) - 2);
}

TEST_F(BuildTest, StoreKeepsItsVocabulary) {
  int left = 50;
  SentencePieceOptions vocabulary;
  vocabulary.vocab_size = 330;
  train_sentencepiece(
      [&](std::string& text) {
        text = "line of a document with some words in it\n";
        return left-- > 0;
      },
      vocabulary, path("v.model"));
  BuildOptions options = corpus();
  options.tokenizer = path("v.model");
  build_store(options);
  fs::remove(path("v.model"));
  const auto tokenizer = load_store_tokenizer(path("out"));
  const Store store(path("out/train"));
  EXPECT_NO_THROW(check_tokenizer(store, tokenizer->fingerprint()));
  EXPECT_CONTAINS(user_error([&] { check_tokenizer(store, make_byte_tokenizer()->fingerprint()); }), "wanted");
  EXPECT_CONTAINS(tokenizer->decode(store.read(3)), "caf\xC3\xA9");
  int64_t bytes = 0;
  for (const int32_t id : store.read(3)) bytes += store.bytes_of_token(id);
  EXPECT_EQ(bytes, store.document(3).text_bytes);
}

class DamageTest : public ScratchTest {
 protected:
  void SetUp() override {
    ScratchTest::SetUp();
    make_store("s", {20, 300, 17, 1, 5000}, 4000);
  }
  std::string file(const std::string& name) const { return path("s/" + name); }
  void change(const std::string& name, const std::function<void(std::string&)>& f) const {
    std::string bytes = read_file(file(name));
    f(bytes);
    std::ofstream(file(name), std::ios::binary) << bytes;
  }
  std::string open_error() const {
    return user_error([this] { Store store(path("s")); });
  }
};

TEST_F(DamageTest, AnySizeOrHeaderIsFoundOnOpening) {
  for (const char* name : {"tokens-000.bin", "tokens-001.bin", "docs.idx", "vocab-bytes.bin"}) {
    const std::string whole = read_file(file(name));
    change(name, [](std::string& bytes) { bytes.pop_back(); });
    EXPECT_CONTAINS(open_error(), name);
    change(name, [](std::string& bytes) { bytes += "xyz"; });
    EXPECT_CONTAINS(open_error(), "meta.json says " + std::to_string(whole.size()));
    change(name, [&](std::string& bytes) { bytes = whole; });
    fs::rename(file(name), file("gone"));
    EXPECT_CONTAINS(open_error(), name);
    fs::rename(file("gone"), file(name));
  }
  EXPECT_NO_THROW(Store(path("s")));
  for (const size_t at : {0u, 8u, 12u, 16u}) {  // magic, version, record size, count
    change("docs.idx", [&](std::string& bytes) { bytes[at] ^= 1; });
    EXPECT_CONTAINS(open_error(), "docs.idx");
    change("docs.idx", [&](std::string& bytes) { bytes[at] ^= 1; });
  }
}

TEST_F(DamageTest, MetaIsCheckedInEveryPart) {
  const std::string whole = read_file(file("meta.json"));
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = whole;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    return user_error([&] { parse_meta(text, "meta.json"); });
  };
  EXPECT_NO_THROW(parse_meta(whole, "meta.json"));
  EXPECT_CONTAINS(replaced("tessera-tokens", "other"), "not the description");
  EXPECT_CONTAINS(replaced("\"version\": 1", "\"version\": 2"), "store format 2, this program reads 1");
  EXPECT_CONTAINS(replaced("\"documents\": 5", "\"documents\": -5"), "\"documents\" is -5");
  EXPECT_CONTAINS(replaced("\"documents\": 5", "\"documents\": 6"), "fingerprint");
  EXPECT_CONTAINS(replaced("\"vocab_size\": 272", "\"vocab_size\": 70000"), "tokens of 2 bytes");
  EXPECT_CONTAINS(replaced("tokens-001.bin", "../secrets.bin"), "wanted tokens-001.bin");
  EXPECT_CONTAINS(replaced("\"tokens\":", "\"token\":"), "\"tokens\" is missing");
  EXPECT_CONTAINS(user_error([&] { parse_meta(whole.substr(0, whole.size() / 2), "meta.json"); }), "no JSON object");
}

TEST_F(DamageTest, VerifyFindsAnyFlippedByte) {
  EXPECT_TRUE(Store(path("s")).verify().empty());
  for (const char* name : {"tokens-000.bin", "tokens-001.bin", "docs.idx", "vocab-bytes.bin"}) {
    const size_t size = read_file(file(name)).size();
    for (const size_t at : {size / 2, size - 2}) {
      change(name, [&](std::string& bytes) { bytes[at] ^= 4; });
      const std::vector<std::string> faults = Store(path("s")).verify();
      ASSERT_FALSE(faults.empty());
      EXPECT_CONTAINS(faults[0], name);
      change(name, [&](std::string& bytes) { bytes[at] ^= 4; });
    }
  }
}

TEST_F(DamageTest, ReadingADamagedStoreFailsCleanly) {
  change("tokens-000.bin", [](std::string& bytes) { bytes[11] = char(0x7F); });
  EXPECT_CONTAINS(user_error([this] { Store(path("s")).read(0); }), "outside the vocabulary of 272");
  change("docs.idx", [](std::string& bytes) { bytes[32 + 48 + 5] = char(0x7F); });  // begin of document 1
  EXPECT_CONTAINS(user_error([this] { Store(path("s")).read(1); }), "no token file holds");
}

TEST_F(ScratchTest, LargeVocabulariesAreStoredInFourBytes) {
  class Wide final : public Tokenizer {
   public:
    const std::string& name() const override { return name_; }
    const std::string& fingerprint() const override { return name_; }
    int64_t vocab_size() const override { return 70'000; }
    const Specials& specials() const override { return specials_; }
    std::string_view token_bytes(int32_t) const override { return "x"; }
    void append_encoded(std::string_view, std::vector<int32_t>&) const override {}

   private:
    std::string name_ = "wide";
    Specials specials_{69'999, -1, -1, -1, {}};
  };
  StoreWriter writer(path("s"), Wide(), 1 << 20);
  const std::vector<int32_t> ids{0, 65'535, 65'536, 69'998, 69'999};
  writer.add(ids, {}, 4, 0);
  EXPECT_EQ(writer.finish().token_bytes, 4);
  EXPECT_EQ(Store(path("s")).read(0), ids);
}

}  // namespace
}  // namespace tessera::data
