// Memory of the host by MPI: messages of a call are posted at once, then asked about until all have arrived.
//
// Waiting is ours, not MPI's: MPI_Wait neither ends when a peer hangs nor gives the core to the other processes where
// there are more of them than cores.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "dist/mpi/check.h"
#include "dist/mpi/machines.h"
#include "dist/mpi/plugin.h"
#include "dist/ranks.h"
#include "dist/waited.h"

namespace tessera::dist::mpi {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Between two looks: first lets others run, then sleeps, up to 200 us. Longer would slow down long messages, which MPI
// carries on with only while it is asked.
class Pause {
 public:
  void operator()() {
    if (++looks_ < kBusyLooks) return std::this_thread::yield();
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(2 * sleep_, microseconds(200));
  }

 private:
  static constexpr int kBusyLooks = 200;
  int looks_ = 0;
  microseconds sleep_{10};
};

struct Posted {
  std::vector<MPI_Request> requests;
  std::vector<int> peers, bytes;  // of each request; bytes -1: a send

  MPI_Request* add(int peer, int receive_bytes) {
    peers.push_back(peer);
    bytes.push_back(receive_bytes);
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }
};

// MPI from its beginning to its end.
class Session {
 public:
  Session() {
    int threads = MPI_THREAD_SINGLE;
    TESSERA_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &threads));
    TESSERA_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    if (threads == MPI_THREAD_MULTIPLE) return;
    MPI_Finalize();
    fail_user("this MPI does not let several threads communicate (MPI_THREAD_MULTIPLE); use one that was built so");
  }
  ~Session() { MPI_Finalize(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(const JobOptions& options) : options_(options), machines_(MPI_COMM_WORLD) {
    TESSERA_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
    TESSERA_MPI(MPI_Comm_rank(comm_, &rank_));
    TESSERA_MPI(MPI_Comm_size(comm_, &size_));
  }
  ~MpiTransport() override { MPI_Comm_free(&comm_); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int node_of(int rank) const override {
    return options_.ranks_per_node > 0 ? static_cast<int>(rank / options_.ranks_per_node) : machines_.machine_of(rank);
  }
  const Share& share() const { return machines_.share(); }

  void exchange(int channel, std::span<const Message> send, std::span<const Message> receive,
                const std::string& what) override {
    Posted posted;
    for (const Message& m : receive) {
      in_pieces(m, [&](void* data, int bytes) {
        TESSERA_MPI(MPI_Irecv(data, bytes, MPI_BYTE, m.peer, channel, comm_, posted.add(m.peer, bytes)));
      });
    }
    for (const Message& m : send) {
      in_pieces(m, [&](const void* data, int bytes) {
        TESSERA_MPI(MPI_Isend(data, bytes, MPI_BYTE, m.peer, channel, comm_, posted.add(m.peer, -1)));
      });
    }
    wait(posted, what);
  }

  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    // Where several fail alike, rank 0 speaks, or else one process of the first machine that has something to say.
    if (rank_ != 0) std::this_thread::sleep_for(milliseconds(100) * (1 + std::min(machines_.machine_of(rank_), 9)));
    if (machines_.speak_first()) {
      const std::string self = fmt::format("rank {}: ", rank_);
      const std::string line = "tessera: " + (why.starts_with(self) ? why : self + why) + "\n";
      [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(5));  // another ends the job meanwhile, with its own exit code
    }
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    _exit(exit_code);
  }

 private:
  // MPI keeps the order of messages with one tag, so a long one may go as several.
  template <class F>
  void in_pieces(const Message& m, F&& f) const {
    for (int64_t begin = 0; begin < m.bytes; begin += options_.piece_bytes) {
      f(static_cast<std::byte*>(m.data) + begin, static_cast<int>(std::min(options_.piece_bytes, m.bytes - begin)));
    }
  }

  void wait(Posted& posted, const std::string& what) const {
    const int count = static_cast<int>(posted.requests.size());
    std::vector<MPI_Status> statuses(posted.requests.size());
    Waited waited;
    Pause pause;
    for (int done = 0; done == 0;) {
      const int error = MPI_Testall(count, posted.requests.data(), &done, statuses.data());
      if (error == MPI_ERR_IN_STATUS) fail(posted, statuses, what);
      TESSERA_MPI(error);
      if (done != 0) break;
      if (waited.seconds() > options_.deadline_seconds) give_up(posted, what);
      pause();
    }
    for (size_t i = 0; i < statuses.size(); ++i) {
      if (posted.bytes[i] < 0) continue;
      int bytes = 0;
      TESSERA_MPI(MPI_Get_count(&statuses[i], MPI_BYTE, &bytes));
      TESSERA_CHECK(bytes == posted.bytes[i], "rank {}: {}: {} bytes from rank {}, wanted {}", rank_, what, bytes,
                    posted.peers[i], posted.bytes[i]);
    }
  }

  [[noreturn]] void fail(const Posted& posted, const std::vector<MPI_Status>& statuses, const std::string& what) const {
    for (size_t i = 0; i < statuses.size(); ++i) {
      const int error = statuses[i].MPI_ERROR;
      if (error == MPI_SUCCESS || error == MPI_ERR_PENDING) continue;
      throw LostProcess(fmt::format("rank {}: {}: {} rank {}: {}", rank_, what, posted.bytes[i] < 0 ? "to" : "from",
                                    posted.peers[i], error_text(error)));
    }
    throw LostProcess(fmt::format("rank {}: {}: MPI reports a failure and no more", rank_, what));
  }

  // The buffers may still be written to: what this throws must end the process.
  [[noreturn]] void give_up(Posted& posted, const std::string& what) const {
    std::vector<int> silent;
    for (size_t i = 0; i < posted.requests.size(); ++i) {
      int done = 0;
      MPI_Test(&posted.requests[i], &done, MPI_STATUS_IGNORE);
      if (done == 0) silent.push_back(posted.peers[i]);
    }
    std::ranges::sort(silent);
    silent.erase(std::unique(silent.begin(), silent.end()), silent.end());
    throw LostProcess(fmt::format("rank {}: {}: no answer from {} in {} s", rank_, what, name_ranks(silent),
                                  options_.deadline_seconds));
  }

  const JobOptions& options_;
  Session session_;  // before and after everything of MPI
  Machines machines_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 0;
};

std::unique_ptr<Transport> join(const JobOptions& options, Share& share) {
  auto transport = std::make_unique<MpiTransport>(options);
  share = transport->share();
  return transport;
}

#define TESSERA_TEXT_OF(x) #x
#define TESSERA_TEXT(x) TESSERA_TEXT_OF(x)
#if defined(OPEN_MPI)
constexpr const char* kBuiltWith = "Open MPI " TESSERA_TEXT(OMPI_MAJOR_VERSION) "." TESSERA_TEXT(
    OMPI_MINOR_VERSION) "." TESSERA_TEXT(OMPI_RELEASE_VERSION);
#elif defined(MPICH_VERSION)
constexpr const char* kBuiltWith = "MPICH " MPICH_VERSION;
#else
constexpr const char* kBuiltWith = "an MPI of standard " TESSERA_TEXT(MPI_VERSION) "." TESSERA_TEXT(MPI_SUBVERSION);
#endif

}  // namespace
}  // namespace tessera::dist::mpi

extern "C" const tessera::dist::mpi::Plugin tessera_mpi_plugin = {
    tessera::dist::mpi::kInterface, tessera::dist::mpi::kBuiltWith, tessera::dist::mpi::join};
