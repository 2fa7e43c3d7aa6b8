// Memory of the GPU by NCCL: the messages of a call are one group on the stream, and the host goes on at once.
//
// One communicator of all processes, made so that no call of it blocks: NCCL's own waits have no end. What waits on the
// host (joining, the first message between two processes) is asked about until the deadline; what waits on the GPU is
// followed by an event after each group, which a thread looks at. Where neither the event nor any before it comes
// within the deadline, or NCCL reports a failure, that thread ends the job: nobody could throw, since the host may be
// waiting for the stream.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

#include "core/cuda/check.h"
#include "core/gpu.h"
#include "dist/cuda/nccl_library.h"
#include "dist/nccl.h"
#include "dist/ranks.h"
#include "dist/waited.h"

namespace tessera::dist {
namespace {

std::vector<int> peers_of(std::span<const Message> send, std::span<const Message> receive) {
  std::vector<int> peers;
  for (const auto& messages : {send, receive}) {
    for (const Message& m : messages) peers.push_back(m.peer);
  }
  std::ranges::sort(peers);
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

std::string bus_id(int device) {
  std::array<char, 32> text{};
  TESSERA_CUDA(cudaDeviceGetPCIBusId(text.data(), text.size(), device));
  return text.data();
}

class NcclTransport final : public Transport {
 public:
  NcclTransport(Transport& host, Communicator& world, const JobOptions& options, int rank_on_machine)
      : host_(host), options_(options) {
    gpu::require();
    nccl();  // its UserError before any message
    choose_gpu(world, rank_on_machine);
    join(world);
    watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  }

  ~NcclTransport() override {
    watcher_ = {};
    gpu::wait_quietly();
    bool ended = !failed(nccl().finalize(comm_));
    for (Waited waited; ended && state() == ncclInProgress && waited.seconds() < options_.deadline_seconds;) pause();
    ended = ended && state() == ncclSuccess;
    (void)(ended ? nccl().destroy(comm_) : nccl().abort(comm_));
    for (const Flight& flight : flights_) spare_.push_back(flight.landed);
    for (cudaEvent_t event : spare_) (void)cudaEventDestroy(event);
  }

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  int node_of(int rank) const override { return host_.node_of(rank); }
  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    host_.abort(why, exit_code);
    std::abort();  // nvcc forgets that the line above does not return
  }

  void exchange(int, std::span<const Message> send, std::span<const Message> receive,
                const std::string& what) override {
    const std::lock_guard lock(mutex_);
    TESSERA_NCCL(nccl().group_start());
    for (const Message& m : send) {
      TESSERA_NCCL(nccl().send(m.data, static_cast<size_t>(m.bytes), ncclUint8, m.peer, comm_, gpu::stream()));
    }
    for (const Message& m : receive) {
      TESSERA_NCCL(nccl().receive(m.data, static_cast<size_t>(m.bytes), ncclUint8, m.peer, comm_, gpu::stream()));
    }
    TESSERA_NCCL(nccl().group_end());
    const std::vector<int> peers = peers_of(send, receive);
    settle(what, peers);
    flights_.push_back({event(), what, peers});
    TESSERA_CUDA(cudaEventRecord(flights_.back().landed, gpu::stream()));
    added_.notify_one();
  }

 private:
  struct Flight {
    cudaEvent_t landed;
    std::string what;
    std::vector<int> peers;
  };

  static void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

  // A launcher may show each process a GPU of its own, or all of them to all.
  void choose_gpu(Communicator& world, int rank_on_machine) {
    const int device = rank_on_machine % static_cast<int>(list_gpus().size());
    gpu::use(device);
    gpu::require();
    const std::vector<std::string> ids = world.all_gather(bus_id(device));
    for (int a = 0; a < size(); ++a) {
      for (int b = 0; b < a; ++b) {
        if (node_of(a) != node_of(b) || ids[size_t(a)] != ids[size_t(b)]) continue;
        fail_user("{} would share one GPU ({}), and each process needs its own; start as many on a machine as it has",
                  name_ranks({b, a}), ids[size_t(a)]);
      }
    }
  }

  void join(Communicator& world) {
    ncclUniqueId id{};
    if (rank() == 0) TESSERA_NCCL(nccl().get_unique_id(&id));
    world.broadcast({id.internal, DType::u8, {int64_t{sizeof id.internal}}}, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    TESSERA_NCCL(nccl().init(&comm_, size(), id, rank(), &config));
    std::vector<int> others;
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) others.push_back(r);
    }
    settle("joining through NCCL", others);
  }

  ncclResult_t state() const {
    ncclResult_t now = ncclSuccess;
    const ncclResult_t asked = nccl().async_error(comm_, &now);
    return failed(asked) ? asked : now;
  }

  // Until NCCL has done on the host what it was asked for.
  void settle(const std::string& what, const std::vector<int>& peers) const {
    for (Waited waited;; pause()) {
      const ncclResult_t now = state();
      if (now == ncclSuccess) return;
      if (failed(now)) throw LostProcess(failure(what, now));
      if (waited.seconds() > options_.deadline_seconds) throw LostProcess(silence(what, peers));
    }
  }

  std::string failure(const std::string& what, ncclResult_t result) const {
    return fmt::format("rank {}: {}: NCCL: {}", rank(), what, error_text(result));
  }
  std::string silence(const std::string& what, const std::vector<int>& peers) const {
    return fmt::format("rank {}: {}: no answer from {}{} in {} s", rank(), what, peers.size() > 1 ? "one of " : "",
                       name_ranks(peers), options_.deadline_seconds);
  }

  cudaEvent_t event() {
    cudaEvent_t event = nullptr;
    if (spare_.empty()) {
      TESSERA_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    } else {
      event = spare_.back();
      spare_.pop_back();
    }
    return event;
  }

  void watch(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (added_.wait(lock, stop, [&] { return !flights_.empty(); })) {
      for (Waited waited; !stop.stop_requested();) {
        const cudaError_t landed = cudaEventQuery(flights_.front().landed);
        if (landed == cudaSuccess) break;
        if (landed != cudaErrorNotReady) return;  // an error of the GPU: the thread that uses it meets it too
        std::string why;
        if (const ncclResult_t now = state(); failed(now)) why = failure(flights_.front().what, now);
        if (waited.seconds() > options_.deadline_seconds) why = silence(flights_.front().what, flights_.front().peers);
        lock.unlock();
        if (!why.empty()) host_.abort(why, kFailed);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        lock.lock();
      }
      if (stop.stop_requested()) return;
      spare_.push_back(flights_.front().landed);
      flights_.pop_front();
    }
  }

  Transport& host_;
  const JobOptions& options_;
  ncclComm_t comm_ = nullptr;
  mutable std::mutex mutex_;  // of everything below, and of calls of the communicator
  std::condition_variable_any added_;
  std::deque<Flight> flights_;  // asked for and not yet seen to have landed
  std::vector<cudaEvent_t> spare_;
  std::jthread watcher_;
};

}  // namespace

std::unique_ptr<Transport> open_nccl(Transport& host, Communicator& world, const JobOptions& options,
                                     int rank_on_machine) {
  return std::make_unique<NcclTransport>(host, world, options, rank_on_machine);
}

}  // namespace tessera::dist
