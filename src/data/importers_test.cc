#include "data/importers.h"

#include "data/include_order.h"
#include "data/jsonl.h"
#include "data/test_support.h"

namespace tessera::data {
namespace {

class ImportersTest : public ScratchTest {
 protected:
  Imported import_all(const Input& input) const {
    Imported all;
    for (const Unit& unit : list_units(input, all.summary)) {
      Imported part = import_unit(unit);
      all.summary.add(part.summary);
      for (Document& document : part.documents) all.documents.push_back(std::move(document));
    }
    return all;
  }

  Input input(const std::string& name, Kind kind = Kind::automatic) const {
    Input made;
    made.path = path(name);
    made.kind = kind;
    return made;
  }
};

TEST_F(ImportersTest, TextLosesByteOrderMarkAndCarriageReturns) {
  write("a.txt", "\xEF\xBB\xBFone\r\ntwo\rthree\r\n");
  const Imported all = import_all(input("a.txt"));
  ASSERT_EQ(all.documents.size(), 1u);
  EXPECT_EQ(all.documents[0].text, "one\ntwo\rthree\n");
  EXPECT_EQ(all.documents[0].name, "a.txt");
}

TEST_F(ImportersTest, DirectoryIsSortedAndCountsWhatItDrops) {
  write("d/b.txt", "second");
  write("d/a/z.html", "<p>first</p>");
  write("d/c.jsonl", "{\"text\": \"third\"}\n");
  write("d/m.py", "print(1)\n");
  write("d/bad.txt", "caf\xE9");
  write("d/empty.txt", " \n");
  write("d/.git/config", "hidden");
  std::filesystem::create_symlink(path("d/b.txt"), path("d/link.txt"));
  const Imported all = import_all(input("d"));
  ASSERT_EQ(all.documents.size(), 4u);
  EXPECT_EQ(all.documents[0].text, "first\n");
  EXPECT_EQ(all.documents[1].text, "second");
  EXPECT_EQ(all.documents[2].text, "third");
  EXPECT_EQ(all.documents[3].text, "m.py\nprint(1)\n");
  EXPECT_EQ(all.documents[3].file_marks, std::vector<int64_t>{0});
  EXPECT_EQ(all.documents[3].content_begin, 5);
  EXPECT_EQ(all.summary.files, 6);
  EXPECT_EQ(all.summary.dropped.at("not UTF-8").count, 1);
  EXPECT_EQ(all.summary.dropped.at("empty").examples, std::vector<std::string>{"empty.txt"});
  EXPECT_EQ(all.summary.dropped.at("hidden").count, 1);
  EXPECT_EQ(all.summary.dropped.at("symbolic link").count, 1);
  EXPECT_CONTAINS(all.summary.describe(), "dropped 1 (not UTF-8): bad.txt");
}

TEST_F(ImportersTest, NamedFileThatIsNotUtf8IsAnErrorWithItsOffset) {
  write("bad.txt", "caf\xE9 au lait");
  const std::string message = user_error([&] { import_all(input("bad.txt")); });
  EXPECT_CONTAINS(message, "byte 3");
  EXPECT_CONTAINS(message, "0xE9");
  EXPECT_CONTAINS(user_error([&] { import_all(input("absent")); }), "no such file");
}

TEST_F(ImportersTest, JsonLines) {
  write("a.jsonl",
        "{\"text\": \"one\\n\\u00e9\", \"body\": \"b1\"}\r\n\nnot json\n{\"text\": 5}\n{\"text\": \" \"}\n"
        "{\"text\": \"caf\xE9\"}\n[1]\n{\"text\": \"last\"}");
  const Imported all = import_all(input("a.jsonl"));
  ASSERT_EQ(all.documents.size(), 2u);
  EXPECT_EQ(all.documents[0].text, "one\n\xC3\xA9");
  EXPECT_EQ(all.documents[1].text, "last");
  EXPECT_EQ(all.summary.dropped.at("line that is not a JSON object").count, 3);
  EXPECT_EQ(all.summary.dropped.at("object without a string \"text\"").count, 1);
  Input other = input("a.jsonl");
  other.text_field = "body";
  ASSERT_EQ(import_all(other).documents.size(), 1u);
  EXPECT_EQ(import_all(other).documents[0].text, "b1");
}

TEST_F(ImportersTest, JsonLineRangesCoverTheFileAtLineEnds) {
  std::string content;
  for (int i = 0; i < 100; ++i) content += "{\"text\": \"" + std::string(static_cast<size_t>(i), 'x') + "\"}\n";
  write("a.jsonl", content);
  for (const int64_t target : {1, 50, 333, 100000}) {
    int64_t at = 0;
    for (const auto& [begin, bytes] : line_ranges(path("a.jsonl"), target)) {
      EXPECT_EQ(begin, at);
      at += bytes;
      EXPECT_EQ(content[static_cast<size_t>(at) - 1], '\n');
    }
    EXPECT_EQ(at, int64_t(content.size()));
  }
}

TEST_F(ImportersTest, SourceFiltersLeaveOutWhatNoOneReads) {
  write("s/good.cc", "int main() {}\n");
  write("s/no_line_end.h", "int x;");
  write("s/long.js", std::string(2001, 'x') + "\n");
  write("s/mean.js", std::string(900, 'x') + "\n" + std::string(900, 'y') + "\n");
  write("s/huge.c", std::string((1 << 20) + 1, '\n'));
  write("s/edge.c", std::string(2000, 'x') + "\n" + std::string(20, '\n'));
  write("s/readme.txt", "text");
  const Imported all = import_all(input("s", Kind::source));
  ASSERT_EQ(all.documents.size(), 3u);
  EXPECT_EQ(all.documents[0].name, "edge.c");
  EXPECT_EQ(all.documents[1].name, "good.cc");
  EXPECT_EQ(all.documents[2].text, "no_line_end.h\nint x;\n");
  EXPECT_EQ(all.summary.dropped.at("source line over 2000 bytes").count, 1);
  EXPECT_EQ(all.summary.dropped.at("source lines over 200 bytes on average").count, 1);
  EXPECT_EQ(all.summary.dropped.at("source file over 1 MiB").count, 1);
  EXPECT_EQ(all.summary.dropped.at("not of kind source").count, 1);
}

// f includes a and e; a and b include each other; b includes c; e includes lib/d by a path from the root; d nothing.
TEST_F(ImportersTest, WholeTreePutsDependenciesFirst) {
  write("t/a.h", "#include \"b.h\"\n");
  write("t/b.h", "  #  include \"a.h\"\n#include \"c.h\"\n");
  write("t/c.h", "#include <vector>\n#include \"absent.h\"\n");
  write("t/lib/d.h", "// no includes\n");
  write("t/lib/e.cc", "#include \"lib/d.h\"\n#include \"../lib/d.h\"\n");
  write("t/aa.cc", "#include \"a.h\"\n#include \"lib/e.cc\"\n");
  Input tree = input("t", Kind::source);
  tree.one_document = true;
  const Imported all = import_all(tree);
  ASSERT_EQ(all.documents.size(), 1u);
  const Document& document = all.documents[0];
  std::vector<std::string> order;
  for (const int64_t mark : document.file_marks) {
    const size_t at = static_cast<size_t>(mark);
    order.push_back(document.text.substr(at, document.text.find('\n', at) - at));
  }
  EXPECT_EQ(order, (std::vector<std::string>{"c.h", "a.h", "b.h", "lib/d.h", "lib/e.cc", "aa.cc"}));
  EXPECT_EQ(document.name, "t");
  Input file = input("t/a.h", Kind::source);
  file.one_document = true;
  EXPECT_CONTAINS(user_error([&] { import_all(file); }), "one_document is for directories");
}

TEST(IncludeOrder, IncludesPrecedeTheirUsers) {
  // A chain as long as a tree can be, listed backwards, must neither overflow a stack nor break a dependency.
  const int64_t n = 200'000;
  std::vector<std::vector<int64_t>> edges(static_cast<size_t>(n));
  for (int64_t i = 0; i + 1 < n; ++i) edges[static_cast<size_t>(i)].push_back(i + 1);
  const std::vector<int64_t> order = dependencies_first(edges);
  ASSERT_EQ(int64_t(order.size()), n);
  for (int64_t i = 0; i < n; ++i) ASSERT_EQ(order[static_cast<size_t>(i)], n - 1 - i);
  EXPECT_TRUE(dependencies_first({}).empty());
}

TEST(Kinds, NamesRoundTrip) {
  for (const Kind kind : {Kind::automatic, Kind::text, Kind::html, Kind::jsonl, Kind::source}) {
    EXPECT_EQ(parse_kind(name_of(kind)), kind);
  }
  EXPECT_CONTAINS(user_error([] { parse_kind("pdf"); }), "wanted one of auto, text, html, jsonl, source");
}

}  // namespace
}  // namespace tessera::data
