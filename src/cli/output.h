// What commands print. Results go to stdout, everything else to stderr.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

// Thrown by print() when whoever read stdout has left (`tessera ... | head`): they have what they wanted.
struct ReaderGone {};

void print(std::string_view text);  // to stdout, flushed; throws Error when it cannot be written (disk full)
void print_json(const nlohmann::ordered_json& json);  // indented, with a newline at the end

// One line on stderr that each call replaces; nothing where stderr is not a terminal. clear_progress() removes it, and
// must come before other lines are printed.
void show_progress(std::string_view line);
void clear_progress();

// Cells in columns, two spaces apart. Columns that hold only numbers (below the heading) are aligned to the right.
class Table {
 public:
  Table() = default;
  explicit Table(std::vector<std::string> headings) : headings_(std::move(headings)) {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::string> headings_;  // empty: no line of headings
  std::vector<std::vector<std::string>> rows_;
};

std::string human_bytes(int64_t bytes);     // "512 B", "1.50 KiB", "23.5 GiB": three digits
std::string human_count(double count);      // "999", "1.50 K", "48.1 B", "2.78 T"; below a thousand three digits too
std::string human_seconds(double seconds);  // "450 us", "12.3 ms", "4.56 s", "3 min 20 s", "2 h 05 min", "3 d 4 h"

}  // namespace tessera::cli
