// Importers: files of several kinds to documents of plain UTF-8 text.
//
//   text     one file, one document; BOM removed, CRLF to LF
//   html     one file, one document, by html_to_text
//   jsonl    one line, one document: the string in `text_field`
//   source   one file, one document, preceded by a file mark and its path; files that no one wrote to be read
//            (minified, generated, huge) are left out. `one_document`: the whole tree, dependencies first.
// A directory is walked in the order of paths; hidden entries and symbolic links are passed over. Nothing is dropped
// silently: ImportSummary counts each class and names the first few.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

enum class Kind : uint8_t { automatic, text, html, jsonl, source };

Kind parse_kind(std::string_view name);  // "auto", "text", "html", "jsonl", "source"
std::string_view name_of(Kind kind);

struct Input {
  std::string path;             // a file or a directory
  Kind kind = Kind::automatic;  // automatic: by extension; unknown extensions are text if they are UTF-8
  std::string text_field = "text";
  bool one_document = false;  // source trees only
};

struct Document {
  std::string name;  // path, with ":line" for JSONL
  std::string text;
  std::vector<int64_t> file_marks;  // offsets in `text` where a file begins (the file_sep token stands there)
  int64_t content_begin = 0;        // duplicates are found by what follows: a copied file differs in its path line
  uint32_t group = 0;               // documents of one directory or file share it
};

struct ImportSummary {
  struct Dropped {
    int64_t count = 0;
    std::vector<std::string> examples;  // the first few
  };
  int64_t files = 0;
  int64_t documents = 0;
  std::map<std::string, Dropped> dropped;  // by reason

  void drop(const std::string& reason, const std::string& example);
  void add(const ImportSummary& later);
  std::string describe() const;  // a few lines for people
};

// A piece of work: a file, a range of lines of a JSONL file, or a whole tree.
struct Unit {
  Kind kind = Kind::text;
  std::string path;
  std::string name;  // relative to the input's directory
  std::string text_field;
  int64_t begin = 0, bytes = 0;  // range in the file; for a tree, bytes of all its files
  int64_t modified_ns = 0;
  bool named = false;              // the user named this very file: trouble with it is an error, not a count
  std::vector<std::string> files;  // of a tree: paths relative to `path`, sorted
};

// Lists what there is to import. `summary` counts files and what the walk passes over.
std::vector<Unit> list_units(const Input& input, ImportSummary& summary);

struct Imported {
  std::vector<Document> documents;
  ImportSummary summary;  // of drops and documents; `files` was counted by list_units
};

Imported import_unit(const Unit& unit);

}  // namespace tessera::data
