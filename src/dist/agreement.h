// Checks at the start of a job that its processes were given the same: a run of processes that differ would go on for
// hours and be worth nothing.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dist/communicator.h"

namespace tessera::dist {

// Name and value: "binary" and its hash, "train.steps" and "300".
using Facts = std::vector<std::pair<std::string, std::string>>;

// UserError on every process where any fact differs between any two of them, or some have a fact that others lack. It
// names every such fact, with its values and the ranks that hold each. Otherwise a few bytes are sent, however many
// facts there are.
void require_same(Communicator& world, const Facts& facts);

// Of the running executable, by content.
std::string hash_of_binary();

}  // namespace tessera::dist
