// The 252 named entities of HTML 4.01 and &apos;, sorted by name.
#include "data/html_entities.h"

#include <algorithm>
#include <iterator>

namespace tessera::data {
namespace {

struct Entity {
  std::string_view name;
  uint32_t code_point;
};

// clang-format off
constexpr Entity kEntities[] = {
    {"AElig", 198}, {"Aacute", 193}, {"Acirc", 194}, {"Agrave", 192}, {"Alpha", 0x391}, {"Aring", 197},
    {"Atilde", 195}, {"Auml", 196}, {"Beta", 0x392}, {"Ccedil", 199}, {"Chi", 0x3A7}, {"Dagger", 0x2021},
    {"Delta", 0x394}, {"ETH", 208}, {"Eacute", 201}, {"Ecirc", 202}, {"Egrave", 200}, {"Epsilon", 0x395},
    {"Eta", 0x397}, {"Euml", 203}, {"Gamma", 0x393}, {"Iacute", 205}, {"Icirc", 206}, {"Igrave", 204},
    {"Iota", 0x399}, {"Iuml", 207}, {"Kappa", 0x39A}, {"Lambda", 0x39B}, {"Mu", 0x39C}, {"Ntilde", 209},
    {"Nu", 0x39D}, {"OElig", 0x152}, {"Oacute", 211}, {"Ocirc", 212}, {"Ograve", 210}, {"Omega", 0x3A9},
    {"Omicron", 0x39F}, {"Oslash", 216}, {"Otilde", 213}, {"Ouml", 214}, {"Phi", 0x3A6}, {"Pi", 0x3A0},
    {"Prime", 0x2033}, {"Psi", 0x3A8}, {"Rho", 0x3A1}, {"Scaron", 0x160}, {"Sigma", 0x3A3}, {"THORN", 222},
    {"Tau", 0x3A4}, {"Theta", 0x398}, {"Uacute", 218}, {"Ucirc", 219}, {"Ugrave", 217}, {"Upsilon", 0x3A5},
    {"Uuml", 220}, {"Xi", 0x39E}, {"Yacute", 221}, {"Yuml", 0x178}, {"Zeta", 0x396}, {"aacute", 225}, {"acirc", 226},
    {"acute", 180}, {"aelig", 230}, {"agrave", 224}, {"alefsym", 0x2135}, {"alpha", 0x3B1}, {"amp", 38},
    {"and", 0x2227}, {"ang", 0x2220}, {"apos", 39}, {"aring", 229}, {"asymp", 0x2248}, {"atilde", 227}, {"auml", 228},
    {"bdquo", 0x201E}, {"beta", 0x3B2}, {"brvbar", 166}, {"bull", 0x2022}, {"cap", 0x2229}, {"ccedil", 231},
    {"cedil", 184}, {"cent", 162}, {"chi", 0x3C7}, {"circ", 0x2C6}, {"clubs", 0x2663}, {"cong", 0x2245},
    {"copy", 169}, {"crarr", 0x21B5}, {"cup", 0x222A}, {"curren", 164}, {"dArr", 0x21D3}, {"dagger", 0x2020},
    {"darr", 0x2193}, {"deg", 176}, {"delta", 0x3B4}, {"diams", 0x2666}, {"divide", 247}, {"eacute", 233},
    {"ecirc", 234}, {"egrave", 232}, {"empty", 0x2205}, {"emsp", 0x2003}, {"ensp", 0x2002}, {"epsilon", 0x3B5},
    {"equiv", 0x2261}, {"eta", 0x3B7}, {"eth", 240}, {"euml", 235}, {"euro", 0x20AC}, {"exist", 0x2203},
    {"fnof", 0x192}, {"forall", 0x2200}, {"frac12", 189}, {"frac14", 188}, {"frac34", 190}, {"frasl", 0x2044},
    {"gamma", 0x3B3}, {"ge", 0x2265}, {"gt", 62}, {"hArr", 0x21D4}, {"harr", 0x2194}, {"hearts", 0x2665},
    {"hellip", 0x2026}, {"iacute", 237}, {"icirc", 238}, {"iexcl", 161}, {"igrave", 236}, {"image", 0x2111},
    {"infin", 0x221E}, {"int", 0x222B}, {"iota", 0x3B9}, {"iquest", 191}, {"isin", 0x2208}, {"iuml", 239},
    {"kappa", 0x3BA}, {"lArr", 0x21D0}, {"lambda", 0x3BB}, {"lang", 0x2329}, {"laquo", 171}, {"larr", 0x2190},
    {"lceil", 0x2308}, {"ldquo", 0x201C}, {"le", 0x2264}, {"lfloor", 0x230A}, {"lowast", 0x2217}, {"loz", 0x25CA},
    {"lrm", 0x200E}, {"lsaquo", 0x2039}, {"lsquo", 0x2018}, {"lt", 60}, {"macr", 175}, {"mdash", 0x2014},
    {"micro", 181}, {"middot", 183}, {"minus", 0x2212}, {"mu", 0x3BC}, {"nabla", 0x2207}, {"nbsp", 160},
    {"ndash", 0x2013}, {"ne", 0x2260}, {"ni", 0x220B}, {"not", 172}, {"notin", 0x2209}, {"nsub", 0x2284},
    {"ntilde", 241}, {"nu", 0x3BD}, {"oacute", 243}, {"ocirc", 244}, {"oelig", 0x153}, {"ograve", 242},
    {"oline", 0x203E}, {"omega", 0x3C9}, {"omicron", 0x3BF}, {"oplus", 0x2295}, {"or", 0x2228}, {"ordf", 170},
    {"ordm", 186}, {"oslash", 248}, {"otilde", 245}, {"otimes", 0x2297}, {"ouml", 246}, {"para", 182},
    {"part", 0x2202}, {"permil", 0x2030}, {"perp", 0x22A5}, {"phi", 0x3C6}, {"pi", 0x3C0}, {"piv", 0x3D6},
    {"plusmn", 177}, {"pound", 163}, {"prime", 0x2032}, {"prod", 0x220F}, {"prop", 0x221D}, {"psi", 0x3C8},
    {"quot", 34}, {"rArr", 0x21D2}, {"radic", 0x221A}, {"rang", 0x232A}, {"raquo", 187}, {"rarr", 0x2192},
    {"rceil", 0x2309}, {"rdquo", 0x201D}, {"real", 0x211C}, {"reg", 174}, {"rfloor", 0x230B}, {"rho", 0x3C1},
    {"rlm", 0x200F}, {"rsaquo", 0x203A}, {"rsquo", 0x2019}, {"sbquo", 0x201A}, {"scaron", 0x161}, {"sdot", 0x22C5},
    {"sect", 167}, {"shy", 173}, {"sigma", 0x3C3}, {"sigmaf", 0x3C2}, {"sim", 0x223C}, {"spades", 0x2660},
    {"sub", 0x2282}, {"sube", 0x2286}, {"sum", 0x2211}, {"sup", 0x2283}, {"sup1", 185}, {"sup2", 178}, {"sup3", 179},
    {"supe", 0x2287}, {"szlig", 223}, {"tau", 0x3C4}, {"there4", 0x2234}, {"theta", 0x3B8}, {"thetasym", 0x3D1},
    {"thinsp", 0x2009}, {"thorn", 254}, {"tilde", 0x2DC}, {"times", 215}, {"trade", 0x2122}, {"uArr", 0x21D1},
    {"uacute", 250}, {"uarr", 0x2191}, {"ucirc", 251}, {"ugrave", 249}, {"uml", 168}, {"upsih", 0x3D2},
    {"upsilon", 0x3C5}, {"uuml", 252}, {"weierp", 0x2118}, {"xi", 0x3BE}, {"yacute", 253}, {"yen", 165},
    {"yuml", 255}, {"zeta", 0x3B6}, {"zwj", 0x200D}, {"zwnj", 0x200C},
};
// clang-format on

}  // namespace

uint32_t html_entity(std::string_view name) {
  const auto before = [](const Entity& entity, std::string_view wanted) { return entity.name < wanted; };
  const Entity* found = std::lower_bound(std::begin(kEntities), std::end(kEntities), name, before);
  return found != std::end(kEntities) && found->name == name ? found->code_point : 0;
}

}  // namespace tessera::data
