#include "dist/in_process.h"

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "core/parallel.h"

namespace tessera::dist {
namespace {

using Bytes = std::vector<std::byte>;

// What was sent and not yet received, of all threads.
struct Mailboxes {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int, int>, std::deque<Bytes>> waiting;  // (from, to, channel)
  std::string end;                                                 // why the job ends; empty: it goes on
  std::exception_ptr first;
};

class InProcess final : public Transport {
 public:
  InProcess(Mailboxes& mail, int rank, int size, const InProcessOptions& options)
      : mail_(mail), rank_(rank), size_(size), options_(options) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int node_of(int rank) const override { return options_.ranks_per_node > 0 ? rank / options_.ranks_per_node : 0; }

  void exchange(int channel, std::span<const Message> send, std::span<const Message> receive,
                const std::string& what) override {
    std::unique_lock lock(mail_.mutex);
    for (const Message& m : send) {
      const auto* bytes = static_cast<const std::byte*>(m.data);
      mail_.waiting[{rank_, m.peer, channel}].emplace_back(bytes, bytes + m.bytes);
    }
    mail_.changed.notify_all();
    for (const Message& m : receive) take(lock, channel, m, what);
  }

  [[noreturn]] void abort(const std::string& why, int) override { throw LostProcess(why); }

 private:
  void take(std::unique_lock<std::mutex>& lock, int channel, const Message& m, const std::string& what) {
    auto& box = mail_.waiting[{m.peer, rank_, channel}];
    const std::chrono::duration<double> deadline(options_.deadline_seconds);
    const bool in_time = mail_.changed.wait_for(lock, deadline, [&] { return !box.empty() || !mail_.end.empty(); });
    if (box.empty() && !mail_.end.empty()) throw LostProcess(fmt::format("rank {}: {}: {}", rank_, what, mail_.end));
    if (!in_time) {
      throw LostProcess(
          fmt::format("rank {}: {}: no answer from rank {} in {} s", rank_, what, m.peer, options_.deadline_seconds));
    }
    const Bytes bytes = std::move(box.front());
    box.pop_front();
    TESSERA_CHECK(std::ssize(bytes) == m.bytes, "rank {}: {}: {} bytes from rank {}, wanted {}", rank_, what,
                  bytes.size(), m.peer, m.bytes);
    std::memcpy(m.data, bytes.data(), bytes.size());
  }

  Mailboxes& mail_;
  int rank_, size_;
  InProcessOptions options_;
};

}  // namespace

void run_in_process(int processes, const InProcessOptions& options, const std::function<void(Transport&)>& work) {
  Mailboxes mail;
  const auto run = [&](int rank) {
    set_thread_count(1);  // of teams that this thread opens
    InProcess transport(mail, rank, processes, options);
    try {
      work(transport);
    } catch (const std::exception& e) {
      const std::lock_guard lock(mail.mutex);
      if (!mail.first) {
        mail.first = std::current_exception();
        mail.end = fmt::format("rank {} ended: {}", rank, e.what());
      }
      mail.changed.notify_all();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < processes; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (mail.first) std::rethrow_exception(mail.first);
}

}  // namespace tessera::dist
