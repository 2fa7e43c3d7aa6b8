#include "data/plan.h"

#include <map>
#include <set>

#include "core/philox.h"
#include "data/inspect.h"
#include "data/loader.h"
#include "data/test_support.h"
#include "data/validation.h"

namespace tessera::data {
namespace {

class PlanTest : public ScratchTest {
 protected:
  std::vector<int64_t> random_lengths(int64_t count, uint64_t seed, int64_t longest) const {
    const Philox random(seed, Purpose::test);
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < count; ++i) lengths.push_back(2 + int64_t(random.bits(uint64_t(i)) % uint64_t(longest)));
    return lengths;
  }

  static Plan plan_of(const std::vector<const Store*>& stores, int64_t context, uint64_t seed = 1) {
    PlanOptions options;
    options.context = context;
    options.seed = seed;
    for (const Store* store : stores) options.sources.push_back({store, store->directory(), 1, 0, 0, 0});
    return Plan(options);
  }

  // Sequences of the first `epochs` epochs of a one-source plan.
  static std::vector<std::vector<Segment>> epoch_sequences(const Store& store, int64_t context, int64_t epochs) {
    StreamOptions options;
    options.context = context;
    options.max_epochs = epochs;
    SourceStream stream(store, options);
    std::vector<std::vector<Segment>> sequences;
    for (int64_t i = 0; stream.has(i); ++i) {
      const auto segments = stream.sequence(i);
      sequences.emplace_back(segments.begin(), segments.end());
    }
    return sequences;
  }
};

TEST_F(PlanTest, AnEpochHoldsEveryTokenOnce) {
  const Store store = make_store("s", random_lengths(700, 1, 300));
  for (const int64_t context : {16, 64, 100, 1000}) {
    std::map<int64_t, std::set<std::pair<int64_t, int64_t>>> pieces;  // by document: (begin, end)
    for (const auto& sequence : epoch_sequences(store, context, 1)) {
      int64_t tokens = 0;
      for (const Segment& segment : sequence) {
        tokens += segment.length;
        EXPECT_EQ(segment.continued, segment.begin > 0);
        EXPECT_TRUE(pieces[segment.doc].insert({segment.begin, segment.begin + segment.length}).second);
      }
      EXPECT_LE(tokens, context);
    }
    ASSERT_EQ(int64_t(pieces.size()), store.documents());
    for (const auto& [doc, ranges] : pieces) {
      int64_t at = 0;
      for (const auto& [begin, end] : ranges) {
        EXPECT_EQ(begin, at);
        at = end;
      }
      EXPECT_EQ(at, store.length(doc));
      if (store.length(doc) <= context) {
        EXPECT_EQ(ranges.size(), 1u);  // only what is too long is cut
      }
    }
  }
}

TEST_F(PlanTest, NeighbouringSequencesComeFromAllOverTheStore) {
  const Store store = make_store("s", random_lengths(300, 2, 2000));
  const auto sequences = epoch_sequences(store, 128, 1);
  size_t same = 0;
  for (size_t q = 1; q < sequences.size(); ++q) same += sequences[q].front().doc == sequences[q - 1].front().doc;
  EXPECT_LT(same, sequences.size() / 50);  // in document order nearly all neighbours would share one
}

TEST_F(PlanTest, EpochsDifferAndShortDocumentsAreNotBunched) {
  const Store store = make_store("s", random_lengths(500, 3, 90));
  const auto one = epoch_sequences(store, 100, 1), two = epoch_sequences(store, 100, 2);
  ASSERT_GT(two.size(), one.size());
  EXPECT_TRUE(std::equal(one.begin(), one.end(), two.begin()));
  EXPECT_FALSE(std::equal(two.begin() + std::ptrdiff_t(one.size()), two.end(), one.begin()));
  const auto mean_segment = [&](size_t begin, size_t end) {
    double tokens = 0, segments = 0;
    for (size_t q = begin; q < end; ++q) {
      for (const Segment& segment : one[q]) tokens += double(segment.length), ++segments;
    }
    return tokens / segments;
  };
  const double first_half = mean_segment(0, one.size() / 2), second_half = mean_segment(one.size() / 2, one.size());
  EXPECT_NEAR(first_half / second_half, 1, 0.35);  // unshuffled, the first half holds the long ones: above 2
}

TEST_F(PlanTest, ExactAndOneMoreThanTheContext) {
  const Store store = make_store("s", {64, 65, 128, 1000});
  std::map<int64_t, std::map<int64_t, int64_t>> pieces;  // of each document: begin, length
  for (const auto& sequence : epoch_sequences(store, 64, 1)) {
    for (const Segment& segment : sequence) pieces[segment.doc][segment.begin] = segment.length;
  }
  EXPECT_EQ(pieces[0], (std::map<int64_t, int64_t>{{0, 64}}));
  EXPECT_EQ(pieces[1], (std::map<int64_t, int64_t>{{0, 33}, {33, 32}}));
  EXPECT_EQ(pieces[2], (std::map<int64_t, int64_t>{{0, 64}, {64, 64}}));
  EXPECT_EQ(pieces[3].size(), 16u);
  EXPECT_EQ(pieces[3].rbegin()->second, 40);
}

TEST_F(PlanTest, ResumingAnywhereGivesTheSameSequences) {
  const Store a = make_store("a", random_lengths(400, 4, 300)), b = make_store("b", random_lengths(50, 5, 40));
  const auto make = [&] { return plan_of({&a, &b}, 128); };
  Plan whole = make();
  std::vector<std::vector<Segment>> sequences;
  const int64_t count = 3000;  // many epochs of both
  for (int64_t q = 0; q < count; ++q) sequences.push_back(whole.sequence(q));
  const Philox random(6, Purpose::test);
  for (uint64_t trial = 0; trial < 100; ++trial) {
    Plan resumed = make();
    EXPECT_EQ(resumed.hash(), whole.hash());
    const int64_t begin = int64_t(random.bits(trial) % uint64_t(count - 20));
    for (int64_t q = begin; q < begin + 20; ++q) ASSERT_EQ(resumed.sequence(q), sequences[size_t(q)]);
  }
  for (uint64_t i = 0; i < 500; ++i) {  // back and forth in one plan
    const int64_t q = int64_t(random.bits(1000 + i) % uint64_t(count));
    ASSERT_EQ(whole.sequence(q), sequences[size_t(q)]);
  }
}

TEST_F(PlanTest, GoesOverPlanBlocks) {
  const Store store = make_store("s", random_lengths(40'000, 7, 20));
  Plan forward = plan_of({&store}, 20), jumped = plan_of({&store}, 20);
  const int64_t q = 65'536 * 2 + 5;
  const auto far = jumped.sequence(q);
  EXPECT_EQ(jumped.sequence(3), forward.sequence(3));
  for (int64_t i = 65'530; i < 65'540; ++i) EXPECT_EQ(jumped.sequence(i), forward.sequence(i));
  EXPECT_EQ(forward.sequence(q), far);
  EXPECT_EQ(forward.progress(q)[0].sequences, q);
}

TEST_F(PlanTest, WeightsGiveTheShareOfTokens) {
  const Store a = make_store("a", random_lengths(300, 8, 300)), b = make_store("b", random_lengths(300, 9, 60));
  PlanOptions options;
  options.context = 256;
  options.sources = {{&a, "a", 3, 0, 0, 0}, {&b, "b", 1, 0, 0, 0}};
  Plan plan(options);
  const auto progress = plan.progress(4000);
  const int64_t total = progress[0].tokens + progress[1].tokens;
  EXPECT_LE(std::abs(double(progress[0].tokens) - 0.75 * double(total)), 256);
  EXPECT_NEAR(progress[1].epochs, double(progress[1].tokens) / double(b.meta().tokens), 1e-9);
  EXPECT_EQ(progress[0].sequences + progress[1].sequences, 4000);
  for (int64_t q = 0; q < 100; ++q) {  // a sequence comes from one source
    const auto sequence = plan.sequence(q);
    for (const Segment& segment : sequence) EXPECT_EQ(segment.source, sequence[0].source);
  }
}

TEST_F(PlanTest, SourceThatIsUsedUpLeavesItsWeight) {
  const Store a = make_store("a", random_lengths(20, 10, 60)), b = make_store("b", random_lengths(300, 11, 60));
  PlanOptions options;
  options.context = 64;
  options.sources = {{&a, "a", 1, 0, 0, 2}, {&b, "b", 1, 0, 0, 0}};
  Plan plan(options);
  const auto progress = plan.progress(1000);
  EXPECT_EQ(progress[0].tokens, 2 * a.meta().tokens);
  options.sources[1].max_epochs = 1;
  Plan finite(options);
  const int64_t last = plan_of({&a}, 64).context();
  EXPECT_NO_THROW(finite.sequence(last));
  EXPECT_CONTAINS(user_error([&] { finite.sequence(5000); }), "raise max_epochs");
  EXPECT_NO_THROW(finite.sequence(0));
}

TEST_F(PlanTest, HashNamesAllThatDecides) {
  const Store a = make_store("a", {20, 30}), b = make_store("b", {20, 31});
  PlanOptions options;
  options.context = 64;
  options.sources = {{&a, "a", 1, 0, 0, 0}};
  const std::string hash = Plan(options).hash();
  EXPECT_EQ(hash, Plan(options).hash());
  std::set<std::string> hashes{hash};
  PlanOptions other = options;
  other.context = 128;
  hashes.insert(Plan(other).hash());
  other = options, other.seed = 1, hashes.insert(Plan(other).hash());
  other = options, other.sources[0].store = &b, hashes.insert(Plan(other).hash());
  other = options, other.sources[0].min_tokens = 25, hashes.insert(Plan(other).hash());
  other = options, other.sources[0].max_tokens = 25, hashes.insert(Plan(other).hash());
  other = options, other.sources[0].max_epochs = 4, hashes.insert(Plan(other).hash());
  other = options, other.sources.push_back({&b, "b", 1, 0, 0, 0}), hashes.insert(Plan(other).hash());
  EXPECT_EQ(hashes.size(), 8u);
}

TEST_F(PlanTest, LengthRangeLeavesDocumentsOut) {
  const Store store = make_store("s", {20, 100, 300, 50});
  PlanOptions options;
  options.context = 512;
  options.sources = {{&store, "s", 1, 50, 100, 1}};
  Plan plan(options);
  std::set<int64_t> docs;
  for (const Segment& segment : plan.sequence(0)) docs.insert(segment.doc);
  EXPECT_EQ(docs, (std::set<int64_t>{1, 3}));
  options.sources[0].min_tokens = 1000;
  options.sources[0].max_tokens = 2000;
  EXPECT_CONTAINS(user_error([&] { Plan none(options); }), "none of 4 documents is 1000 to 2000 tokens");
  options.sources[0].weight = 0;
  EXPECT_CONTAINS(user_error([&] { Plan none(options); }), "are 0");
}

TEST_F(PlanTest, TargetsStayInsideTheDocument) {
  const Store store = make_store("s", {5, 64, 150, 1, 9});
  Plan plan = plan_of({&store}, 64);
  Loader loader(plan);
  int64_t loss_tokens = 0, text_bytes = 0;
  std::map<int64_t, int64_t> predicted;
  const int64_t sequences = int64_t(epoch_sequences(store, 64, 1).size());
  const Batch batch = loader.batch(0, sequences);
  batch.documents().check(batch.tokens());
  ASSERT_EQ(batch.segments.size(), batch.offsets.size() - 1);
  ASSERT_EQ(batch.targets.size(), batch.ids.size());
  EXPECT_EQ(int64_t(batch.sequence_offsets.size()), sequences + 1);
  EXPECT_EQ(batch.tokens(), store.meta().tokens);  // no padding is stored
  for (int64_t n = 0; n < batch.documents().count(); ++n) {
    const Segment& segment = batch.segments[size_t(n)];
    const std::vector<int32_t> ids = store.read(segment.doc);
    ASSERT_EQ(batch.documents().length(n), segment.length);
    for (int64_t i = 0; i < segment.length; ++i) {
      const size_t t = size_t(batch.documents().begin(n) + i), at = size_t(segment.begin + i);
      ASSERT_EQ(batch.ids[t], ids[at]);
      const int32_t target = at + 1 < ids.size() ? ids[at + 1] : kNoTarget;
      ASSERT_EQ(batch.targets[t], target);
      if (target == kNoTarget) continue;
      ++loss_tokens;
      ++predicted[segment.doc];
      text_bytes += target == 256 ? 0 : 1;
    }
  }
  EXPECT_EQ(batch.loss_tokens, loss_tokens);
  EXPECT_EQ(batch.text_bytes, text_bytes);
  for (const auto& [doc, count] : predicted) EXPECT_EQ(count, store.length(doc) - 1);  // all but the first token
  EXPECT_EQ(loss_tokens, store.meta().tokens - store.documents());
}

TEST_F(PlanTest, BatchesDependOnTheirSequencesAlone) {
  const Store store = make_store("s", random_lengths(100, 12, 90));
  Plan plan = plan_of({&store}, 64);
  Loader straight(plan);
  std::vector<int32_t> ids;
  for (int step = 0; step < 6; ++step) {
    const Batch batch = straight.batch(4 * step, 4);
    ids.insert(ids.end(), batch.ids.begin(), batch.ids.end());
  }
  std::vector<int32_t> resumed_ids = straight.batch(0, 10).ids;  // other batch sizes before and after
  Plan again = plan_of({&store}, 64);
  EXPECT_EQ(again.hash(), plan.hash());
  Loader second(again);
  for (int64_t q = 10; q < 24; q += 2) {
    const Batch batch = second.batch(q, 2);
    resumed_ids.insert(resumed_ids.end(), batch.ids.begin(), batch.ids.end());
  }
  EXPECT_EQ(resumed_ids, ids);
  EXPECT_NE(plan_of({&store}, 64, 99).hash(), plan.hash());
  EXPECT_EQ(straight.batch(3, 0).tokens(), 0);
}

TEST_F(PlanTest, StoresOfDifferentTokenizersDoNotMix) {
  const Store a = make_store("a", {20});
  make_store("b", {20});
  StoreMeta meta = a.meta();
  meta.tokenizer_fingerprint = "another";
  meta.fingerprint = fingerprint_of(meta);
  write("b/meta.json", write_meta(meta));
  const Store b(path("b"));
  EXPECT_CONTAINS(user_error([&] { plan_of({&a, &b}, 64); }), "made with tokenizer");
}

TEST_F(PlanTest, OneDocumentOfOneToken) {
  const Store store = make_store("s", {1});
  Plan plan = plan_of({&store}, 1 << 20);
  Loader loader(plan);
  const Batch batch = loader.batch(70, 3);
  EXPECT_EQ(batch.ids, (std::vector<int32_t>{256, 256, 256}));
  EXPECT_EQ(batch.loss_tokens, 0);
}

TEST_F(PlanTest, ValidationIsFixedAndBounded) {
  const Store store = make_store("s", random_lengths(200, 13, 300));
  const ValidationSet all(store, {128, 0, 512, 0});
  EXPECT_EQ(all.tokens(), store.meta().tokens);
  int64_t tokens = 0;
  for (int64_t i = 0; i < all.count(); ++i) {
    const Batch batch = all.batch(i);
    EXPECT_LE(batch.tokens(), 512);
    batch.documents().check(batch.tokens());
    tokens += batch.tokens();
  }
  EXPECT_EQ(tokens, all.tokens());
  const ValidationSet some(store, {128, 1000, 0, 0}), again(store, {128, 1000, 0, 0});
  EXPECT_LE(some.tokens(), 1000);
  EXPECT_GT(some.tokens(), 800);
  ASSERT_EQ(some.count(), again.count());
  for (int64_t i = 0; i < some.count(); ++i) {
    EXPECT_EQ(some.batch(i).ids, again.batch(i).ids);
    EXPECT_EQ(some.batch(i).sequence_offsets.size(), 2u);
  }
  EXPECT_EQ(ValidationSet(store, {128, 0, 0, 1000}).count(), 0);
  EXPECT_EQ(ValidationSet(make_store("none", {}), {128, 0, 0, 0}).count(), 0);
}

TEST_F(PlanTest, Inspection) {
  const Store store = make_store("s", {20, 64, 200, 31});
  const auto tokenizer = make_byte_tokenizer();
  InspectOptions options;
  options.context = 64;
  options.budget_tokens = 630;
  options.sample_document = 1;
  options.sample_tokens = 5;
  const Inspection report = inspect(store, *tokenizer, options);
  EXPECT_EQ(report.documents, 4);
  EXPECT_EQ(report.tokens, 315);
  EXPECT_EQ(report.text_bytes, 311);
  EXPECT_EQ(report.histogram[4], 2);
  EXPECT_EQ(report.histogram[6], 1);
  EXPECT_EQ(report.histogram[7], 1);
  EXPECT_EQ(report.shortest, 20);
  EXPECT_EQ(report.median, 64);
  EXPECT_EQ(report.longest, 200);
  EXPECT_EQ(report.packing.sequences, 5);
  EXPECT_EQ(report.packing.cut_documents, 1);
  EXPECT_EQ(report.packing.segments, 7);
  EXPECT_DOUBLE_EQ(report.packing.padding, 1 - 315.0 / 320.0);
  EXPECT_DOUBLE_EQ(report.epochs, 2);
  EXPECT_EQ(report.sample_length, 64);
  EXPECT_EQ(report.sample_text, "\x07\x08\x09\x0A\x0B");
  options.sample_document = 4;
  EXPECT_CONTAINS(user_error([&] { inspect(store, *tokenizer, options); }), "wanted one from 0 to 3");
  EXPECT_EQ(inspect(make_store("none", {}), *tokenizer, {}).sample_document, -1);
}

}  // namespace
}  // namespace tessera::data
