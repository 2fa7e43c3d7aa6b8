#include "support.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "core/philox.h"

namespace tessera::test {

namespace fs = std::filesystem;

TemporaryDirectory::TemporaryDirectory() {
  std::string name = (fs::temp_directory_path() / "tessera-test-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
  path_ = name;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::permissions(path_, fs::perms::owner_all, ignored);
  fs::remove_all(path_, ignored);
}

pid_t start_program(const std::vector<std::string>& command, const std::string& out, const std::string& err) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const auto redirect = [](const std::string& path, int to) {
      dup2(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), to);
    };
    redirect(out, STDOUT_FILENO);
    redirect(err, STDERR_FILENO);
    execvp(argv.front(), argv.data());
    _exit(127);
  }
  return child;
}

static std::vector<std::string> tessera_command(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), TESSERA_BINARY);
  return arguments;
}

Outcome run_program(const std::vector<std::string>& command) {
  const TemporaryDirectory dir;
  const pid_t child = start_program(command, dir.path("out"), dir.path("err"));
  int status = 0;
  waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(dir.path("out")), read_file(dir.path("err"))};
}

Outcome tessera(const std::vector<std::string>& arguments) { return run_program(tessera_command(arguments)); }

pid_t start_tessera(const std::vector<std::string>& arguments) {
  return start_program(tessera_command(arguments), "/dev/null", "/dev/null");
}

// The MPI library itself leaks, which is not ours to judge.
std::vector<std::string> mpirun_command(int processes, const std::vector<std::string>& command) {
  std::vector<std::string> all = {
      "mpirun", "--allow-run-as-root",    "--oversubscribe", "-x", "ASAN_OPTIONS=detect_leaks=0",
      "-n",     fmt::to_string(processes)};
  all.insert(all.end(), command.begin(), command.end());
  return all;
}

std::string why_no_mpi() {
  if (run_program({"mpirun", "--version"}).exit_code != 0) return "mpirun is missing: scripts/setup";
  if (!fs::exists(fs::path(TESSERA_BINARY).replace_filename("libtessera_mpi.so"))) {
    return "this build has no MPI plugin: scripts/setup, then configure again";
  }
  const Outcome o = run_program(mpirun_command(2, {"true"}));
  return o.exit_code == 0 ? "" : "mpirun cannot start processes here: " + o.err;
}

void write_file(const std::string& path, const std::string& text) {
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string source_path(const std::string& name) { return (fs::path(TESSERA_SOURCE) / name).string(); }

std::string sample_text(int64_t words, uint64_t seed) {
  static const char* const kWords[] = {"the",   "state", "of",     "a",     "model",   "decays", "and",
                                       "every", "token", "writes", "one",   "value",   "under",  "its",
                                       "key",   "so",    "that",   "later", "readers", "find"};
  const Philox random(seed, Purpose::test);
  std::string text;
  uint64_t previous = 0;
  for (int64_t i = 0; i < words; ++i) {
    previous = (previous * 7 + random.bits(static_cast<uint64_t>(i)) % 4) % 20;  // four likely followers of each word
    text += kWords[previous];
    text += i % 12 == 11 ? ".\n" : " ";
  }
  return text;
}

void write_small_run(const TemporaryDirectory& dir, int64_t steps, const std::string& more) {
  for (int64_t i = 0; i < 60; ++i) {
    write_file(dir.path(fmt::format("text/{:02}.txt", i)), sample_text(60 + 40 * (i % 9), static_cast<uint64_t>(i)));
  }
  const Outcome built =
      tessera({"data", "build", dir.path("text"), "--out", dir.path("store"), "--valid-fraction", "0.2"});
  ASSERT_EQ(built.exit_code, 0) << built.err;
  write_file(dir.path("model.toml"),
             "name = \"small-test\"\nlayers = 3\nwidth = 32\nmla_layers = [3]\ninit_std = 0.1\n"
             "[kda]\nheads = 2\nhead_dim = 16\ngate_rank = 8\nchunk = 16\n"
             "[mla]\nheads = 2\nq_rank = 16\nkv_rank = 16\nnope_dim = 16\nrope_dim = 8\nvalue_dim = 16\n"
             "[ffn]\ndense_hidden = 64\n[moe]\nexperts = 8\ntop_k = 2\nhidden = 32\nlatent = 16\n"
             "[residual]\nattn_res_block = 1\n");
  write_file(
      dir.path("run.toml"),
      fmt::format("[run]\ndir = \"{}\"\nthreads = 2\n[model]\nfile = \"{}\"\n[data]\nstore = \"{}\"\ncontext = 128\n"
                  "[train]\nsteps = {}\ntokens_per_step = 1024\nmicro_tokens = 512\n"
                  "[optim]\nwarmup_steps = 4\n[eval]\nevery = 10\ntokens = 2048\n{}",
                  dir.path("run"), dir.path("model.toml"), dir.path("store"), steps, more));
}

}  // namespace tessera::test
