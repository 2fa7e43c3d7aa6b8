// What whole-run tests share: a directory of their own, the binary run as a user runs it, small models and corpora.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::test {

// A fresh directory, removed at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  std::string path(const std::string& name = "") const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

struct Outcome {
  int exit_code = -1;  // -1: ended by a signal
  std::string out, err;
};

Outcome run_program(const std::vector<std::string>& command);    // found on PATH; waits
Outcome tessera(const std::vector<std::string>& arguments);      // waits
pid_t start_tessera(const std::vector<std::string>& arguments);  // in the background, output dropped
// In the background, output to these files.
pid_t start_program(const std::vector<std::string>& command, const std::string& out, const std::string& err);

// Several processes over MPI: more than cores, and as root in a container.
std::vector<std::string> mpirun_command(int processes, const std::vector<std::string>& command);
std::string why_no_mpi();  // empty: mpirun works here and this build has the plugin

void write_file(const std::string& path, const std::string& text);
std::string read_file(const std::string& path);
std::string source_path(const std::string& name);  // in the source tree

// English-like text with structure to learn: about `words` words, the same every time.
std::string sample_text(int64_t words, uint64_t seed);

// Builds DIR/store (bytes), DIR/model.toml (a nano-class model small enough for seconds) and DIR/run.toml over them.
void write_small_run(const TemporaryDirectory& dir, int64_t steps, const std::string& more = "");

}  // namespace tessera::test
