#include "data/inspect.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "data/source_stream.h"

namespace tessera::data {
namespace {

PackingReport packing_of(const Store& store, int64_t context) {
  if (context < 2) fail_user("context {}; wanted at least 2 tokens", context);
  PackingReport report;
  report.context = context;
  StreamOptions options;
  options.context = context;
  options.max_epochs = 1;
  SourceStream stream(store, options);
  int64_t tokens = 0;
  for (; stream.has(report.sequences); ++report.sequences) {
    const auto segments = stream.sequence(report.sequences);
    report.segments += static_cast<int64_t>(segments.size());
    for (const Segment& segment : segments) tokens += segment.length;
  }
  for (int64_t doc = 0; doc < store.documents(); ++doc) report.cut_documents += store.length(doc) > context ? 1 : 0;
  report.padding = 1 - double(tokens) / (double(report.sequences) * double(context));
  return report;
}

void add_lengths(const Store& store, Inspection& out) {
  std::vector<int64_t> lengths;
  for (int64_t doc = 0; doc < store.documents(); ++doc) lengths.push_back(store.length(doc));
  const auto middle = lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / 2);
  std::nth_element(lengths.begin(), middle, lengths.end());
  out.median = *middle;
  out.shortest = *std::min_element(lengths.begin(), lengths.end());
  out.longest = *std::max_element(lengths.begin(), lengths.end());
}

void add_sample(const Store& store, const Tokenizer& tokenizer, const InspectOptions& options, Inspection& out) {
  if (options.sample_document < 0 || options.sample_document >= store.documents()) {
    fail_user("document {} of {}; wanted one from 0 to {}", options.sample_document, store.documents(),
              store.documents() - 1);
  }
  out.sample_document = options.sample_document;
  out.sample_length = store.length(options.sample_document);
  std::vector<int32_t> ids(static_cast<size_t>(std::clamp<int64_t>(options.sample_tokens, 0, out.sample_length)));
  store.read(options.sample_document, 0, ids);
  out.sample_text = tokenizer.decode(ids);
}

}  // namespace

Inspection inspect(const Store& store, const Tokenizer& tokenizer, const InspectOptions& options) {
  check_tokenizer(store, tokenizer.fingerprint());
  const StoreMeta& meta = store.meta();
  Inspection out;
  out.directory = store.directory();
  out.fingerprint = meta.fingerprint;
  out.tokenizer_name = meta.tokenizer_name;
  out.tokenizer_fingerprint = meta.tokenizer_fingerprint;
  out.vocab_size = meta.vocab_size;
  out.documents = meta.documents;
  out.tokens = meta.tokens;
  out.text_bytes = meta.text_bytes;
  out.histogram = meta.histogram;
  out.token_files = static_cast<int64_t>(meta.files.size()) - 2;
  for (const StoreFile& file : meta.files) out.file_bytes += file.bytes;
  out.packing.context = options.context;
  if (meta.documents == 0) return out;
  out.bytes_per_token = double(meta.text_bytes) / double(meta.tokens);
  out.epochs = double(options.budget_tokens) / double(meta.tokens);
  add_lengths(store, out);
  out.packing = packing_of(store, options.context);
  add_sample(store, tokenizer, options, out);
  return out;
}

}  // namespace tessera::data
