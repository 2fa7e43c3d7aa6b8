#include "dist/job.h"

#include <algorithm>
#include <cstdlib>

#include "config/options.h"
#include "core/cgroup.h"
#include "core/log.h"
#include "core/parallel.h"
#include "dist/launcher.h"
#include "dist/mpi_plugin.h"
#include "dist/nccl.h"

namespace tessera::dist {

void JobOptions::bind(config::Options& o) {
  o.add("parallel.deadline_seconds", &deadline_seconds,
        "a process that does not answer for so long is lost, and the run ends", config::above(0));
  o.add("parallel.ranks_per_node", &ranks_per_node,
        "takes that many neighbouring processes for one machine; 0: the machines as they are", config::at_least(0));
}

namespace {

constexpr int kWorldChannel = 1000;  // its own, so that no call along the mesh is taken for the end of the work

class Alone final : public Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int node_of(int) const override { return 0; }
  void exchange(int, std::span<const Message> send, std::span<const Message> receive,
                const std::string& what) override {
    TESSERA_CHECK(send.empty() && receive.empty(), "{}: messages in a job of one process", what);
  }
  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    if (exit_code == kUserMistake) throw UserError(why);
    throw Error(why);
  }
};

}  // namespace

Job::Job() : host_(std::make_unique<Alone>()) {
  const std::optional<Launcher> launcher = find_launcher();
  if (!launcher || launcher->processes == 1) return;
  host_ = join_by_mpi(*launcher, options_, share_);
  if (size() == 1) return;
  set_log_prefix(fmt::format("rank {}: ", rank()));
  if (std::getenv("OMP_NUM_THREADS") == nullptr) share_cpus();
}

Job::~Job() = default;

void Job::share_cpus() {
  double cpus = share_.cpus;
  if (const double limit = read_cgroup_limits().cpus; limit > 0) {
    int here = 0;
    for (int r = 0; r < size(); ++r) here += host_->node_of(r) == host_->node_of(rank());
    cpus = std::min(cpus, limit / here);
  }
  set_thread_count(std::max(1, static_cast<int>(cpus + 1e-6)));
}

void Job::use_gpus() {
  if (size() == 1) return;
  Communicator everyone = world();
  gpu_ = open_nccl(*host_, everyone, options_, share_.rank);
}

Communicator Job::world() {
  std::vector<int> everyone;
  for (int r = 0; r < size(); ++r) everyone.push_back(r);
  return {"world", std::move(everyone), kWorldChannel, *host_, gpu_.get()};
}

void Job::run(const std::function<void()>& work) {
  if (size() == 1) return work();
  try {
    work();
    world().barrier();
  } catch (const std::exception& error) {
    const Ending ending = ending_of(error);
    host_->abort(ending.message, ending.exit_code);
  } catch (...) {
    host_->abort("an exception of an unknown type", kFailed);
  }
}

}  // namespace tessera::dist
