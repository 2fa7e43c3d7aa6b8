// A group of processes along one axis of the mesh, and what they do together.
//
// Every member makes the same calls in the same order. Sums are taken in the order of the ranks, each element by one
// process, so that all members hold the same bits and a run on one layout repeats exactly. Sizes are known to both
// sides: nothing is negotiated. Views are contiguous, in memory of the host or, with a GPU transport, of the GPU.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/context.h"
#include "dist/transport.h"

namespace tessera::dist {

// Bytes that this process sent. A message to itself counts nothing.
struct Traffic {
  int64_t inside = 0;  // to processes on the same node
  int64_t across = 0;  // to other nodes
  int64_t calls = 0;
  int64_t rows = 0;  // of tokens, to the processes of their experts (expert_exchange.h)

  Traffic& operator+=(const Traffic& other);
  int64_t bytes() const { return inside + across; }
};

class Communicator {
 public:
  // `members`: ranks in the job, ascending; this process is one of them. `channel` tells groups apart that share a
  // process. `gpu` may be null.
  Communicator(std::string axis, std::vector<int> members, int channel, Transport& host, Transport* gpu);

  const std::string& axis() const { return axis_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  bool alone() const { return size() == 1; }
  int rank_in_job(int member) const { return members_[static_cast<size_t>(member)]; }
  int node_of(int member) const { return host_->node_of(rank_in_job(member)); }

  // Element r of `send` goes to member r; element r of `receive` comes from it. Absent or empty views: no message.
  // Own ones are copied.
  void all_to_all(std::span<const View> send, std::span<const View> receive);
  // parts[r] of every member r, everywhere. parts[rank()] holds this process's own before the call.
  void all_gather(std::span<const View> parts);
  void all_gather(const View& rows);  // the same, of ranges of rows that differ by one row at most
  void broadcast(const View& values, int root);
  // The sum of everyone's `values` (f32, f64, i32, i64), in place, everywhere.
  void all_reduce(Context&, const View& values);
  // parts[r]: this process's contribution to what member r is to hold. `sum`, the shape of parts[rank()], gets the sum
  // of what everyone has for this process; it may be parts[rank()] itself. f32, f64, i32, i64.
  void reduce_scatter(Context&, std::span<const View> parts, const View& sum);
  // One pair of neighbours at a time; absent: nothing in that direction.
  void send_receive(const View& send, int to, const View& receive, int from);
  // The same of several views, one after the other; there may be more in one direction than in the other.
  void send_receive(std::span<const View> send, int to, std::span<const View> receive, int from);
  void barrier();

  // Small things on the host, with room from the heap.
  void all_reduce(const View& values);
  std::vector<int64_t> all_gather(int64_t value);
  std::vector<std::string> all_gather(const std::string& text);
  int64_t sum(int64_t value);
  double sum(double value);

  const Traffic& traffic() const { return traffic_; }
  void count_rows(int64_t rows) { traffic_.rows += rows; }

 private:
  void exchange(const char* what, std::span<const View> send, std::span<const View> receive);

  std::string axis_;
  std::vector<int> members_;
  int rank_ = 0, channel_ = 0;
  Transport* host_;
  Transport* gpu_;
  Traffic traffic_;
};

}  // namespace tessera::dist
