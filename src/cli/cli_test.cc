// The helpers of the command line, and the binary itself: its exit codes and what goes to which stream.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "cli/overrides.h"

namespace tessera::cli {
namespace {

TEST(Output, HumanBytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1000), "0.98 KiB");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
  EXPECT_EQ(human_bytes(int64_t{25} << 30), "25.0 GiB");
  EXPECT_EQ(human_bytes(INT64_MAX), "8.00 EiB");
  EXPECT_EQ(human_bytes(-2048), "-2.00 KiB");
}

TEST(Output, HumanCount) {
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(0.25), "0.25");
  EXPECT_EQ(human_count(1000), "1.00 K");
  EXPECT_EQ(human_count(48.1e9), "48.1 B");
  EXPECT_EQ(human_count(2.78e12), "2.78 T");
  EXPECT_EQ(human_count(999.6e6), "1.00 B");
}

TEST(Output, HumanSeconds) {
  EXPECT_EQ(human_seconds(0.00045), "450 us");
  EXPECT_EQ(human_seconds(0.0123), "12.3 ms");
  EXPECT_EQ(human_seconds(4.56), "4.56 s");
  EXPECT_EQ(human_seconds(200), "3 min 20 s");
  EXPECT_EQ(human_seconds(7500), "2 h 05 min");
  EXPECT_EQ(human_seconds(3 * 86400 + 4 * 3600), "3 d 4 h");
}

TEST(Output, TableAlignsNumbersRightAndTextLeft) {
  Table table({"name", "count"});
  table.add({"é", "5"});
  table.add({"long name", "1234"});
  EXPECT_EQ(table.text(), "name       count\né              5\nlong name   1234\n");
  EXPECT_EQ(Table().text(), "");
}

TEST(Overrides, FlagsAndSetReachTheOptions) {
  int64_t steps = 1;
  std::vector<int64_t> lengths;
  config::Options options;
  options.add("train.steps", &steps, "optimizer steps");
  options.add("lengths", &lengths, "context lengths");
  Overrides overrides;
  CLI::App app;
  overrides.add_to(app, options.keys());
  EXPECT_NE(app.help().find("optimizer steps"), std::string::npos);
  app.parse("--train.steps -5 --set lengths=1,2 --set lengths=[3]");
  overrides.apply(options);
  EXPECT_EQ(steps, -5);
  EXPECT_EQ(lengths, (std::vector<int64_t>{3}));
  EXPECT_THROW(app.parse("--set steps"), UserError);
  EXPECT_THROW(app.parse("--train.setps 5"), CLI::ExtrasError);
}

struct Result {
  int code = -1;
  std::string out;
};

const std::string kBinary = std::string("'") + TESSERA_BINARY + "' ";

Result shell(const std::string& command) {
  Result result;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> buffer;
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) result.out.append(buffer.data(), n);
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

// Redirections say which stream is looked at: "2>&1 >/dev/null" for stderr alone.
Result tessera(const std::string& arguments) { return shell(kBinary + arguments); }

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Binary, HelpAndVersion) {
  const Result help = tessera("--help 2>/dev/null");
  EXPECT_EQ(help.code, 0);
  EXPECT_CONTAINS(help.out, "doctor");
  EXPECT_CONTAINS(tessera("doctor --help").out, "--json");
  EXPECT_EQ(tessera("--version").out.rfind("tessera ", 0), 0u);
}

TEST(Binary, MistakesOfTheUserExitWith2) {
  const Result none = tessera("2>&1 >/dev/null");
  EXPECT_EQ(none.code, 2);
  EXPECT_CONTAINS(none.out, "doctor");
  const Result command = tessera("docter 2>&1 >/dev/null");
  EXPECT_EQ(command.code, 2);
  EXPECT_EQ(command.out.rfind("tessera: unknown command 'docter'; did you mean 'doctor'? (commands: ", 0), 0u)
      << command.out;
  const Result option = tessera("doctor --jsn 2>&1 >/dev/null");
  EXPECT_EQ(option.code, 2);
  EXPECT_EQ(option.out,
            "tessera: unexpected '--jsn'; did you mean '--json'?\nrun 'tessera doctor --help' for what can be given\n");
  EXPECT_EQ(tessera("doctor --jsn 2>/dev/null").out, "");
}

TEST(Binary, DoctorPrintsJson) {
  const Result result = tessera("doctor --json 2>/dev/null");
  EXPECT_EQ(result.code, 0);
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_GT(json.at("memory_bytes").get<int64_t>(), 0);
  EXPECT_GE(json.at("openmp_threads").get<int>(), 1);
  EXPECT_TRUE(json.at("findings").is_array());
  const auto plugin = json.at("mpi_plugin");
  EXPECT_TRUE(plugin.at("path").get<std::string>().ends_with("/libtessera_mpi.so"));
  EXPECT_NE(plugin.at("problem").get<std::string>().empty(), plugin.at("built_with").get<std::string>().empty());
  for (const char* library : {"mpi", "nccl"}) {  // where it was found, its version too
    EXPECT_EQ(json.at(library + std::string("_library")).get<std::string>().empty(),
              json.at(library + std::string("_version")).get<std::string>().empty());
  }
}

TEST(Binary, OutputThatCannotBeWritten) {
  // The reader has left by the time of the first line; the exit code travels beside the pipe.
  EXPECT_EQ(shell("exec 3>&1; ( sleep 0.3; " + kBinary + "doctor; echo code $? >&3 ) | true").out, "code 0\n");
  const Result full = tessera("doctor 2>&1 >/dev/full");
  EXPECT_EQ(full.code, 1);
  EXPECT_CONTAINS(full.out, "No space left on device");
}

}  // namespace
}  // namespace tessera::cli
