#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::data {

// Code point of a named character reference (`amp`, `eacute`: case matters), 0 when there is none of that name.
uint32_t html_entity(std::string_view name);

}  // namespace tessera::data
