#include "data/tokenizer.h"

#include "core/file.h"
#include "core/philox.h"
#include "data/sentencepiece.h"
#include "data/test_support.h"
#include "data/utf8.h"

namespace tessera::data {
namespace {

// Everything that tends to go wrong: spaces at both ends and in runs, tabs, CRLF, the space mark of SentencePiece
// itself, its unknown mark, names of specials, emoji with joiners, combining marks, NUL, ligatures that NFKC changes.
std::vector<std::string> odd_texts() {
  return {"",
          " ",
          "hello world",
          "  two  spaces  \n\n\n\tand tabs\t\t\r\n end ",
          "mark \xE2\x96\x81 and \xE2\x96\x81\xE2\x96\x81 again\xE2\x96\x81",
          "block \xE2\x96\x85 \xE2\x81\x87",
          "<unk> <s> </s> <pad> <file_sep> <0x41> <reserved_0>",
          "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7 family \xF0\x9F\x98\x80",
          "e\xCC\x81 \xC3\xA9 \xEF\xAC\x81 \xE2\x84\xAB \xC2\xA0nbsp",
          std::string("nul \0 inside", 12),
          "1234567890 3.14159",
          "\xD0\x9F\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82 \xE4\xB8\x96\xE7\x95\x8C",
          "\xFF\xFE not UTF-8 \xC3"};
}

std::string random_text(uint64_t seed) {
  const Philox random(seed, Purpose::test);
  std::string text;
  for (uint64_t i = 0; i < 200; ++i) {
    const uint64_t draw = random.bits(i);
    append_utf8(draw % 3 == 0 ? uint32_t(draw >> 8) % 0x110000 : 32 + uint32_t(draw >> 8) % 96, text);
  }
  return text;
}

void expect_lossless(const Tokenizer& tokenizer) {
  std::vector<std::string> texts = odd_texts();
  for (uint64_t seed = 0; seed < 20; ++seed) texts.push_back(random_text(seed));
  for (const std::string& text : texts) {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    EXPECT_EQ(tokenizer.decode(ids), text);
    size_t bytes = 0;
    for (const int32_t id : ids) {
      ASSERT_GE(id, 0);
      ASSERT_LT(id, tokenizer.vocab_size());
      EXPECT_NE(id, tokenizer.eos_id());
      bytes += tokenizer.token_bytes(id).size();
    }
    EXPECT_EQ(bytes, text.size());
  }
}

TEST(ByteTokenizer, IsLossless) { expect_lossless(*make_byte_tokenizer()); }

TEST(ByteTokenizer, HasTheStatedIds) {
  const auto tokenizer = load_tokenizer("bytes");
  EXPECT_EQ(tokenizer->vocab_size(), 272);
  EXPECT_EQ(tokenizer->specials().eos, 256);
  EXPECT_EQ(tokenizer->specials().pad, 257);
  EXPECT_EQ(tokenizer->specials().bos, 258);
  EXPECT_EQ(tokenizer->specials().file_sep, 259);
  EXPECT_EQ(tokenizer->specials().reserved.size(), 12u);
  EXPECT_EQ(tokenizer->encode("A\xFF"), (std::vector<int32_t>{65, 255}));
  EXPECT_EQ(tokenizer->token_bytes(256), "");
  EXPECT_THROW(tokenizer->token_bytes(272), Error);
}

TEST(StreamDecoder, WithholdsUntilACharacterIsComplete) {
  StreamDecoder decoder(make_byte_tokenizer());
  EXPECT_EQ(decoder.push('a'), "a");
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.push(0x9F), "");
  EXPECT_EQ(decoder.push(256), "");
  EXPECT_EQ(decoder.push(0x98), "");
  EXPECT_EQ(decoder.push(0x80), "\xF0\x9F\x98\x80");
  EXPECT_EQ(decoder.push(0x80), "\xEF\xBF\xBD");  // a continuation byte alone
  EXPECT_EQ(decoder.push(0xC3), "");
  EXPECT_EQ(decoder.push('b'),
            "\xEF\xBF\xBD"
            "b");  // the character was cut off
  EXPECT_EQ(decoder.push(0xE2), "");
  EXPECT_EQ(decoder.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(Utf8, FindsTheFirstInvalidByte) {
  EXPECT_EQ(find_invalid_utf8(""), -1);
  EXPECT_EQ(find_invalid_utf8("plain ASCII, longer than eight bytes \xC3\xA9"), -1);
  EXPECT_EQ(find_invalid_utf8("12345678\xFF"), 8);
  EXPECT_EQ(find_invalid_utf8("ab\xC0\x80"), 2);        // overlong NUL
  EXPECT_EQ(find_invalid_utf8("\xED\xA0\x80"), 0);      // surrogate
  EXPECT_EQ(find_invalid_utf8("\xF4\x90\x80\x80"), 0);  // above U+10FFFF
  EXPECT_EQ(find_invalid_utf8("x\xE2\x82"), 1);         // cut off
}

class SentencePieceTest : public ScratchTest {
 protected:
  std::string train(const std::string& name, int64_t vocab_size) {
    size_t i = 0;
    SentencePieceOptions options;
    options.vocab_size = vocab_size;
    train_sentencepiece(
        [&i](std::string& text) {
          if (i == 40) return false;
          text = "    for (int i = 0; i < " + std::to_string(i) +
                 "; ++i) {\n\treturn the quick brown fox;\n\n"
                 " the lazy dog jumps over the quick fence again\r\n";
          ++i;
          return true;
        },
        options, path(name));
    return path(name);
  }
};

TEST_F(SentencePieceTest, IsLosslessAndDeterministic) {
  const auto tokenizer = load_tokenizer(train("a.model", 400));
  EXPECT_EQ(tokenizer->vocab_size(), 400);
  expect_lossless(*tokenizer);
  EXPECT_EQ(tokenizer->specials().reserved.size(), 11u);
  EXPECT_GE(tokenizer->specials().file_sep, 0);
  EXPECT_LT(tokenizer->encode("the quick brown fox").size(), 15u);  // it has learned words
  EXPECT_EQ(read_file(train("b.model", 400)), read_file(path("a.model")));
  EXPECT_NE(load_tokenizer(train("c.model", 384))->fingerprint(), tokenizer->fingerprint());
}

TEST_F(SentencePieceTest, LongTextsAreCutWithoutTrace) {
  const auto tokenizer = load_tokenizer(train("a.model", 400));
  std::string lines, one_line;
  for (int i = 0; i < 6000; ++i) {
    lines += "the quick line " + std::to_string(i) + "\n\n";
    one_line += "caf\xC3\xA9 the quick ";
  }
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(lines)), lines);
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(one_line)), one_line);
  std::vector<int32_t> by_line;  // cutting at line ends must not change the ids
  for (size_t at = 0; at < lines.size();) {
    const size_t end = lines.find("\n\n", at) + 2;
    tokenizer->append_encoded(std::string_view(lines).substr(at, end - at), by_line);
    at = end;
  }
  EXPECT_EQ(tokenizer->encode(lines), by_line);
}

TEST_F(SentencePieceTest, RefusesWhatIsNoModel) {
  EXPECT_CONTAINS(user_error([&] { load_tokenizer(path("absent.model")); }), "absent.model");
  EXPECT_CONTAINS(user_error([&] { load_tokenizer(write("text.model", "no model at all")); }),
                  "no SentencePiece model");
  const std::string model = read_file(train("a.model", 400));
  EXPECT_CONTAINS(user_error([&] { load_tokenizer(write("cut.model", model.substr(0, model.size() / 2))); }),
                  "cut.model");
  EXPECT_CONTAINS(user_error([&] { load_tokenizer(write("empty.model", "")); }), "empty.model");
}

TEST_F(SentencePieceTest, SaysWhenTheVocabularyIsTooLarge) {
  EXPECT_CONTAINS(user_error([&] { train("a.model", 100000); }), "a smaller one");
  EXPECT_CONTAINS(user_error([&] { train_sentencepiece([](std::string&) { return false; }, {}, path("x")); }),
                  "no text");
}

}  // namespace
}  // namespace tessera::data
