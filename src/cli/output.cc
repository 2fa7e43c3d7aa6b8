#include "cli/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tessera::cli {
namespace {

// Columns on the screen: code points, which is right for the scripts that names here are written in.
int64_t width_of(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

std::string padded(const std::string& text, int64_t width, bool to_right) {
  const std::string space(static_cast<size_t>(std::max<int64_t>(width - width_of(text), 0)), ' ');
  return to_right ? space + text : text + space;
}

bool looks_like_number(const std::string& cell) {
  const size_t first = cell.find_first_not_of("+-");
  if (std::count(cell.begin(), cell.end(), ' ') > 1) return false;  // a sentence; one space stands before a unit
  return cell == "-" || (first != std::string::npos && first <= 1 && cell[first] >= '0' && cell[first] <= '9');
}

std::string three_digits(double value) {
  const double size = std::abs(value);
  return fmt::format("{:.{}f}", value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

}  // namespace

void print(std::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (written) return;
  if (errno == EPIPE) throw ReaderGone();
  throw Error(fmt::format("cannot write the results to stdout: {}", std::strerror(errno)));
}

void print_json(const nlohmann::ordered_json& json) {
  // Names from hardware and files may hold bytes that are not UTF-8; JSON must not.
  print(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void show_progress(std::string_view line) {
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  if (!terminal) return;
  std::fprintf(stderr, "\r%.*s\x1b[K", static_cast<int>(line.size()), line.data());  // ESC [K: clear to the line's end
  std::fflush(stderr);
}

void clear_progress() { show_progress(""); }

std::string Table::text() const {
  std::vector<std::vector<std::string>> lines;
  if (!headings_.empty()) lines.push_back(headings_);
  lines.insert(lines.end(), rows_.begin(), rows_.end());
  std::vector<int64_t> widths;
  for (const auto& line : lines) {
    widths.resize(std::max(widths.size(), line.size()), 0);
    for (size_t c = 0; c < line.size(); ++c) widths[c] = std::max(widths[c], width_of(line[c]));
  }
  std::vector<bool> to_right(widths.size(), !rows_.empty());
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) to_right[c] = to_right[c] && looks_like_number(row[c]);
  }
  std::string out;
  for (const auto& line : lines) {
    std::string text;
    for (size_t c = 0; c < line.size(); ++c) text += (c == 0 ? "" : "  ") + padded(line[c], widths[c], to_right[c]);
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  }
  return out;
}

std::string human_bytes(int64_t bytes) {
  static constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; std::abs(value) >= 999.5 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{} {}", three_digits(value), kUnits[unit]);
}

std::string human_count(double count) {
  static constexpr std::array kUnits = {"", " K", " M", " B", " T", " Q"};
  double value = count;
  size_t unit = 0;
  for (; std::abs(value) >= 999.5 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  const bool whole = unit == 0 && count == std::floor(count);
  return (whole ? fmt::format("{:.0f}", count) : three_digits(value)) + kUnits[unit];
}

std::string human_seconds(double seconds) {
  if (seconds < 0.9995e-3) return fmt::format("{} us", three_digits(seconds * 1e6));
  if (seconds < 0.9995) return fmt::format("{} ms", three_digits(seconds * 1e3));
  if (seconds < 59.95) return fmt::format("{} s", three_digits(seconds));
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  if (whole < 2 * 86400) return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
  return fmt::format("{} d {} h", whole / 86400, whole % 86400 / 3600);
}

}  // namespace tessera::cli
