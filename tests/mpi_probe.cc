// One process of a job, as mpi_test wants it: works together with the others, or fails in one of the ways that
// processes fail. The first argument says which; the last rank is the one that fails.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <thread>

#include "collectives.h"
#include "core/log.h"
#include "core/parallel.h"
#include "dist/agreement.h"
#include "dist/job.h"
#include "dist/mesh.h"

namespace tessera::test {
namespace {

// Each rank's line, printed by the first.
void print_lines(dist::Job& job, const std::string& own) {
  dist::Communicator world = job.world();
  const std::vector<std::string> lines = world.all_gather(own);
  for (size_t r = 0; r < lines.size() && job.first(); ++r) std::printf("%s\n", lines[r].c_str());
}

void collectives(dist::Job& job) { print_lines(job, Collectives(job.host()).run()); }

void in_pieces(dist::Job& job) {
  job.set({.piece_bytes = 1000});
  collectives(job);
}

void in_two_threads(dist::Job& job) {
  std::string other;
  std::thread thread([&] {
    set_thread_count(1);
    other = Collectives(job.host(), 1).run();
  });
  const std::string own = Collectives(job.host(), 2).run();
  thread.join();
  print_lines(job, own == other ? own : "the threads differ");
}

void long_message(dist::Job& job) {  // more bytes than 32 bits count
  std::vector<uint8_t> bytes((size_t{1} << 31) + 5, uint8_t(job.rank()));
  dist::Communicator world = job.world();
  world.broadcast({bytes.data(), DType::u8, {std::ssize(bytes)}}, 0);
  print_lines(job, fmt::to_string(bytes.front() + bytes.back()));
}

void nodes(dist::Job& job) {
  const int found = job.host().node_of(job.rank());
  job.set({.ranks_per_node = 2});
  print_lines(job, fmt::format("found {}, set {}", found, job.host().node_of(job.rank())));
}

void threads(dist::Job& job) { print_lines(job, fmt::to_string(thread_count())); }

void log_line(dist::Job&) { log_info("here"); }

void disagreement(dist::Job& job) {
  dist::Communicator world = job.world();
  dist::require_same(
      world,
      {{"binary", "abc"}, {"train.steps", job.rank() == 1 ? "200" : "300"}, {"data", fmt::to_string(job.rank() / 2)}});
}

// The last rank does `fail` among many barriers.
void fail_midway(dist::Job& job, const std::function<void()>& fail) {
  dist::Communicator world = job.world();
  for (int i = 0;; ++i) {
    if (i == 100) job.set({.deadline_seconds = 2});
    if (i == 100 && job.rank() == job.size() - 1) fail();
    world.barrier();
  }
}

// The last rank is killed in the middle of whatever it is doing.
void killed(dist::Job& job) {
  if (job.rank() == job.size() - 1) {
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      raise(SIGKILL);
    }).detach();
  }
  for (;;) Collectives(job.host()).run();
}

// The last process of a pipeline stops between two micro-batches.
void pipeline_stopped(dist::Job& job) {
  dist::Mesh mesh({.pipeline = job.size()}, job.host());
  std::vector<float> stream(1000);
  const View view(stream.data(), DType::f32, {1000});
  job.set({.deadline_seconds = 2});
  const bool last = job.rank() == job.size() - 1;
  for (int i = 0;; ++i) {
    if (i == 100 && last) raise(SIGSTOP);
    mesh.pipeline.send_receive(last ? View() : view, job.rank() + 1, job.rank() > 0 ? view : View(), job.rank() - 1);
  }
}

const std::map<std::string, std::function<void()>> kFailures = {
    {"exits", [] { std::exit(0); }},
    {"user-error", [] { fail_user("the disk is full"); }},
    {"exception", [] { throw std::runtime_error("something broke"); }},
    {"unknown-exception", [] { throw 1; }},
    {"thread-exception", [] { std::thread([] { throw std::runtime_error("something broke"); }).join(); }},
    {"stopped", [] { raise(SIGSTOP); }},
};

const std::map<std::string, void (*)(dist::Job&)> kModes = {
    {"collectives", collectives},
    {"pieces", in_pieces},
    {"threads", in_two_threads},
    {"long", long_message},
    {"nodes", nodes},
    {"thread-count", threads},
    {"killed", killed},
    {"log", log_line},
    {"differ", disagreement},
    {"pipeline-stopped", pipeline_stopped},
};

}  // namespace
}  // namespace tessera::test

int main(int argc, char** argv) {
  using namespace tessera;
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    dist::Job job;
    job.run([&] {
      if (const auto failure = test::kFailures.find(mode); failure != test::kFailures.end()) {
        return test::fail_midway(job, failure->second);
      }
      test::kModes.at(mode)(job);
    });
    return 0;
  } catch (const std::exception& error) {
    const Ending ending = ending_of(error);
    std::fprintf(stderr, "tessera: %s\n", ending.message.c_str());
    return ending.exit_code;
  }
}
