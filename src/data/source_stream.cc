#include "data/source_stream.h"

#include <algorithm>

#include "core/error.h"
#include "data/order.h"
#include "data/packing.h"

namespace tessera::data {
namespace {

constexpr int64_t kBufferDocuments = 65'536;
constexpr size_t kKeptBuffers = 2;
constexpr uint64_t kShuffleKey = 0x73687566666C65;  // keeps the order of sequences apart from the order of documents

}  // namespace

SourceStream::SourceStream(const Store& store, const StreamOptions& options) : store_(store), options_(options) {
  const std::string index = store.directory() + "/docs.idx";
  const auto inside = [&](int64_t tokens) {
    return tokens >= options.min_tokens && (options.max_tokens == 0 || tokens <= options.max_tokens);
  };
  int64_t end = 0;
  for (int64_t doc = 0; doc < store.documents(); ++doc) {
    check_record(store.document(doc), doc, end, store.meta().tokens, index);
    end += store.length(doc);
    if (!inside(store.length(doc))) continue;
    ++documents_;
    tokens_per_epoch_ += store.length(doc);
    chosen_.push_back(doc);
  }
  if (documents_ == store.documents()) chosen_ = {};
  if (documents_ == 0) {
    fail_user("{}: none of {} documents is {} to {} tokens long; widen the length range or take another source",
              store.directory(), store.documents(), options.min_tokens,
              options.max_tokens == 0 ? std::string("any number of") : std::to_string(options.max_tokens));
  }
}

int64_t SourceStream::document_at(int64_t position) const {
  return chosen_.empty() ? position : chosen_[static_cast<size_t>(position)];
}

int64_t SourceStream::buffers_per_epoch() const { return (documents_ + kBufferDocuments - 1) / kBufferDocuments; }

bool SourceStream::buffer_exists(int64_t number) const {
  return options_.max_epochs == 0 || number < options_.max_epochs * buffers_per_epoch();
}

std::vector<Segment> SourceStream::cut_documents(int64_t number) const {
  const int64_t epoch = number / buffers_per_epoch();
  const int64_t begin = number % buffers_per_epoch() * kBufferDocuments;
  const Permutation order(documents_, options_.seed, static_cast<uint64_t>(options_.source),
                          static_cast<uint64_t>(epoch));
  std::vector<Segment> pieces;
  for (int64_t position = begin; position < std::min(begin + kBufferDocuments, documents_); ++position) {
    const int64_t doc = document_at(order(position));
    int64_t at = 0;
    for (const int64_t length : cut_lengths(store_.length(doc), options_.context)) {
      pieces.push_back({options_.source, doc, at, length, at > 0});
      at += length;
    }
  }
  return pieces;
}

SourceStream::Buffer SourceStream::make(int64_t number) const {
  const std::vector<Segment> pieces = cut_documents(number);
  std::vector<int64_t> lengths;
  for (const Segment& piece : pieces) lengths.push_back(piece.length);
  const Bins bins = pack_best_fit(lengths, options_.context);
  const Permutation shuffle(bins.count(), options_.seed ^ kShuffleKey, static_cast<uint64_t>(options_.source),
                            static_cast<uint64_t>(number));
  Buffer buffer;
  buffer.number = number;
  for (int64_t place = 0; place < bins.count(); ++place) {
    for (const int64_t item : bins.bin(shuffle(place))) buffer.segments.push_back(pieces[static_cast<size_t>(item)]);
    buffer.begin.push_back(static_cast<int64_t>(buffer.segments.size()));
  }
  return buffer;
}

const SourceStream::Buffer& SourceStream::buffer(int64_t number) {
  for (const auto& kept : recent_) {
    if (kept->number == number) return *kept;
  }
  recent_.push_back(std::make_shared<const Buffer>(make(number)));
  if (recent_.size() > kKeptBuffers) recent_.erase(recent_.begin());
  const Buffer& made = *recent_.back();
  if (static_cast<int64_t>(first_.size()) == number + 1) {
    first_.push_back(first_.back() + static_cast<int64_t>(made.begin.size()) - 1);
  }
  return made;
}

bool SourceStream::has(int64_t i) {
  while (first_.back() <= i) {
    const int64_t number = static_cast<int64_t>(first_.size()) - 1;
    if (!buffer_exists(number)) return false;
    buffer(number);
  }
  return true;
}

const SourceStream::Buffer& SourceStream::buffer_of(int64_t i) {
  TESSERA_CHECK(i >= 0 && has(i), "sequence {} of a source that ends before", i);
  return buffer(std::upper_bound(first_.begin(), first_.end(), i) - first_.begin() - 1);
}

std::span<const Segment> SourceStream::sequence(int64_t i) {
  const Buffer& holder = buffer_of(i);
  const size_t local = static_cast<size_t>(i - first_[static_cast<size_t>(holder.number)]);
  return std::span(holder.segments)
      .subspan(static_cast<size_t>(holder.begin[local]),
               static_cast<size_t>(holder.begin[local + 1] - holder.begin[local]));
}

int64_t SourceStream::tokens(int64_t i) {
  int64_t sum = 0;
  for (const Segment& segment : sequence(i)) sum += segment.length;
  return sum;
}

int64_t SourceStream::epoch_of(int64_t i) { return buffer_of(i).number / buffers_per_epoch(); }

}  // namespace tessera::data
