#include "data/html.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <span>

#include "data/html_entities.h"
#include "data/utf8.h"

namespace tessera::data {
namespace {

constexpr size_t kLongestReference = 32;

enum class Gap : uint8_t { none, space, line, paragraph };  // ordered: the wider gap wins

constexpr std::string_view kParagraphTags[] = {
    "address", "article", "aside", "blockquote", "body", "details", "dl",    "fieldset", "figure",
    "footer",  "form",    "h1",    "h2",         "h3",   "h4",      "h5",    "h6",       "header",
    "hr",      "main",    "ol",    "p",          "pre",  "section", "table", "ul",
};
constexpr std::string_view kLineTags[] = {"caption", "dd", "div", "dt", "figcaption", "li", "option", "summary", "tr"};
constexpr std::string_view kCellTags[] = {"td", "th"};
constexpr std::string_view kDroppedTags[] = {"head", "iframe", "nav", "noscript", "object", "svg", "template"};
// The navigation role of ARIA, and the paragraph signs that documentation generators put behind headings.
constexpr std::string_view kDecorations[] = {"role=\"navigation\"", "class=\"headerlink\""};
constexpr std::string_view kVoidTags[] = {"area",  "base", "br",   "col",    "embed", "hr", "img",
                                          "input", "link", "meta", "source", "track", "wbr"};  // have no end tag
constexpr std::string_view kRawTags[] = {"script", "style"};  // their content is not markup

bool among(std::string_view name, std::span<const std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

struct Tag {
  std::string name;
  bool closing = false;
  bool empty = false;       // <name/>
  bool decoration = false;  // its attributes say that it is no part of the text
};

class Stripper {
 public:
  explicit Stripper(std::string_view html) : in_(html) {}

  std::string run() {
    while (at_ < in_.size()) {
      if (in_[at_] == '<' && at_ + 1 < in_.size() && markup()) continue;
      text();
    }
    while (!out_.empty() && is_space(out_.back())) out_.pop_back();
    if (!out_.empty()) out_.push_back('\n');
    return std::move(out_);
  }

 private:
  // Consumes one tag, comment or declaration; false when '<' begins none and is text.
  bool markup() {
    const char next = in_[at_ + 1];
    if (in_.substr(at_, 4) == "<!--") return skip_past("-->", at_ + 4);
    if (next == '!' || next == '?') return skip_past(">", at_ + 2);
    const bool closing = next == '/';
    const size_t name = at_ + (closing ? 2 : 1);
    if (name >= in_.size() || !is_letter(in_[name])) return false;
    apply(read_tag(name, closing));
    return true;
  }

  bool skip_past(std::string_view end, size_t from) {
    const size_t found = in_.find(end, std::min(from, in_.size()));
    at_ = found == std::string_view::npos ? in_.size() : found + end.size();
    return true;
  }

  // A quote counts only as the first character of an attribute's value, so that stray ones end at the next '>'.
  Tag read_tag(size_t name, bool closing) {
    Tag tag;
    tag.closing = closing;
    at_ = name;
    while (at_ < in_.size() && !is_space(in_[at_]) && in_[at_] != '>' && in_[at_] != '/') {
      tag.name.push_back(lower(in_[at_++]));
    }
    const size_t attributes = at_;
    bool value = false;
    while (at_ < in_.size() && in_[at_] != '>') {
      const char c = in_[at_++];
      if (value && (c == '"' || c == '\'')) at_ = std::min(in_.find(c, at_), in_.size() - 1) + 1;
      value = c == '=' || (value && is_space(c));
      tag.empty = c == '/';
    }
    for (const std::string_view decoration : kDecorations) {
      tag.decoration |= in_.substr(attributes, at_ - attributes).find(decoration) != std::string_view::npos;
    }
    if (at_ < in_.size()) ++at_;
    return tag;
  }

  void apply(const Tag& tag) {
    if (!tag.closing && among(tag.name, kRawTags)) return skip_raw(tag.name);
    if (!dropping_.empty()) return apply_dropped(tag);
    if (among(tag.name, kDroppedTags) || (tag.decoration && !among(tag.name, kVoidTags))) {
      if (!tag.closing && !tag.empty) {
        dropping_ = tag.name;
        drop_depth_ = 1;
      }
      return widen(tag.name == "a" ? Gap::none : Gap::line);
    }
    if (tag.name == "pre") return apply_pre(tag);
    if (tag.name == "br") return line_break();
    if (among(tag.name, kParagraphTags)) return widen(Gap::paragraph);
    if (among(tag.name, kLineTags)) return widen(Gap::line);
    if (among(tag.name, kCellTags)) return widen(Gap::space);
  }

  void apply_dropped(const Tag& tag) {
    if (tag.name == dropping_) drop_depth_ += tag.closing ? -1 : tag.empty ? 0 : 1;
    const bool head_ended = dropping_ == "head" && tag.name == "body";  // </head> may be left out
    if (drop_depth_ == 0 || head_ended) dropping_.clear();
  }

  void apply_pre(const Tag& tag) {
    widen(Gap::paragraph);
    if (tag.closing) {
      pre_depth_ = std::max(0, pre_depth_ - 1);
      return;
    }
    ++pre_depth_;
    if (in_.substr(at_, 2) == "\r\n") ++at_;
    if (at_ < in_.size() && in_[at_] == '\n') ++at_;  // the line end after <pre> is no part of it
  }

  void line_break() {
    if (pre_depth_ > 0) return put('\n');
    gap_ = gap_ >= Gap::line ? Gap::paragraph : Gap::line;
  }

  void skip_raw(std::string_view name) {
    for (size_t open = in_.find("</", at_); open != std::string_view::npos; open = in_.find("</", open + 2)) {
      const std::string_view end = in_.substr(open + 2, name.size());
      if (std::equal(end.begin(), end.end(), name.begin(), name.end(), [](char a, char b) { return lower(a) == b; })) {
        skip_past(">", open);
        return;
      }
    }
    at_ = in_.size();
  }

  void text() {
    if (in_[at_] == '&' && reference()) return;
    const char c = in_[at_++];
    if (!dropping_.empty()) return;
    if (pre_depth_ > 0) {
      if (c != '\r' || at_ == in_.size() || in_[at_] != '\n') put(c);
    } else if (is_space(c)) {
      widen(Gap::space);
    } else {
      put(c);
    }
  }

  // Consumes a character reference; false when '&' begins none.
  bool reference() {
    const std::string_view ahead = in_.substr(at_ + 1, kLongestReference);  // no search to the end of the input
    const size_t length = ahead.find(';');
    if (length == std::string_view::npos) return false;
    const std::string_view name = ahead.substr(0, length);
    uint32_t code_point = 0;
    if (!name.empty() && name[0] == '#') {
      if (!numeric(name.substr(1), code_point)) return false;
    } else {
      code_point = html_entity(name);
      if (code_point == 0) return false;
    }
    at_ += length + 2;
    if (!dropping_.empty()) return true;
    std::string character;
    append_utf8(code_point, character);
    for (const char c : character) put(c);
    return true;
  }

  static bool numeric(std::string_view digits, uint32_t& code_point) {
    const bool hex = !digits.empty() && lower(digits[0]) == 'x';
    if (hex) digits.remove_prefix(1);
    if (digits.empty()) return false;
    uint32_t value = 0;
    for (const char c : digits) {
      const char d = lower(c);
      if (!is_digit(d) && !(hex && d >= 'a' && d <= 'f')) return false;
      value = std::min<uint32_t>(value * (hex ? 16 : 10) + static_cast<uint32_t>(is_digit(d) ? d - '0' : d - 'a' + 10),
                                 0x110000);
    }
    code_point = value == 0 ? 0xFFFD : windows_1252(value);
    return true;
  }

  // Numbers 128..159 are C1 controls by the letter and Windows-1252 by universal practice.
  static uint32_t windows_1252(uint32_t value) {
    static constexpr std::array<uint16_t, 32> kTable{0x20AC, 0x81,   0x201A, 0x0192, 0x201E, 0x2026, 0x2020, 0x2021,
                                                     0x02C6, 0x2030, 0x0160, 0x2039, 0x0152, 0x8D,   0x017D, 0x8F,
                                                     0x90,   0x2018, 0x2019, 0x201C, 0x201D, 0x2022, 0x2013, 0x2014,
                                                     0x02DC, 0x2122, 0x0161, 0x203A, 0x0153, 0x9D,   0x017E, 0x0178};
    return value >= 0x80 && value < 0xA0 ? kTable[value - 0x80] : value;
  }

  void widen(Gap gap) { gap_ = std::max(gap_, gap); }

  void put(char c) {
    if (gap_ != Gap::none && !out_.empty()) {
      if (gap_ == Gap::space) {
        if (!is_space(out_.back())) out_.push_back(' ');
      } else {
        open_line(gap_ == Gap::line ? 1 : 2);
      }
    }
    gap_ = Gap::none;
    out_.push_back(c);
  }

  void open_line(int line_ends) {
    while (!out_.empty() && out_.back() == ' ') out_.pop_back();
    for (auto c = out_.rbegin(); c != out_.rend() && *c == '\n' && line_ends > 0; ++c) --line_ends;
    out_.append(static_cast<size_t>(line_ends), '\n');
  }

  std::string_view in_;
  size_t at_ = 0;
  std::string out_;
  Gap gap_ = Gap::none;
  int pre_depth_ = 0;
  std::string dropping_;  // name of the dropped element we are in
  int drop_depth_ = 0;    // of elements of that name
};

}  // namespace

std::string html_to_text(std::string_view html) { return Stripper(html).run(); }

}  // namespace tessera::data
