// "Did you mean": the known word nearest to what was typed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera::config {

// Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b` (optimal string alignment).
int64_t edit_distance(std::string_view a, std::string_view b);

// The nearest of `known` (the first of equals), or "" where none is within a third of the word's length, at least 1.
std::string nearest(std::string_view word, std::span<const std::string> known);

// "; did you mean 'WORD'?", or "" for an empty word. Ends the sentence that names what was not known.
std::string did_you_mean(std::string_view word);

}  // namespace tessera::config
