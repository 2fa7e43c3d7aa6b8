// What carries bytes between the processes of a job. MPI for memory of the host, NCCL for memory of the GPU, threads of
// one process for tests, and nothing at all for plans.
//
// One primitive, a set of messages that leave and arrive together: every collective is made of it, once, in
// communicator.cc. So sums have the same order whatever carries them, and every byte is counted in one place.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/view.h"

namespace tessera::dist {

// Another process did not answer, or the connection to it is gone. Ends the job: nothing is tried again.
class LostProcess : public Error {
 public:
  using Error::Error;
};

struct Message {
  int peer = 0;  // rank in the job
  void* data = nullptr;
  int64_t bytes = 0;  // 0 is not sent
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int node_of(int rank) const = 0;  // machines, counted from 0 in the order of their lowest rank

  // Returns when all of `receive` has arrived and the memory of `send` may be written again (in the GPU's order with
  // memory of the GPU). At most one message to and one from each peer; between two processes the messages of one
  // channel arrive in the order of the calls. Calls of different channels may run in different threads at the same
  // time. `what` names the call in the LostProcess thrown where a peer does not answer in time.
  virtual void exchange(int channel, std::span<const Message> send, std::span<const Message> receive,
                        const std::string& what) = 0;

  // Ends the job: every other process ends too, now. `why` is for people, the exit code for what started the job.
  [[noreturn]] virtual void abort(const std::string& why, int exit_code) = 0;
};

// Of a plan: the process of that rank, which sends nothing.
class DryTransport final : public Transport {
 public:
  DryTransport(int rank, std::vector<int> node_of_rank) : rank_(rank), nodes_(std::move(node_of_rank)) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(nodes_.size()); }
  int node_of(int rank) const override { return nodes_[static_cast<size_t>(rank)]; }
  void exchange(int, std::span<const Message>, std::span<const Message>, const std::string&) override {}
  [[noreturn]] void abort(const std::string& why, int) override { throw Error(why); }

 private:
  int rank_;
  std::vector<int> nodes_;
};

}  // namespace tessera::dist
