// SPDX-License-Identifier: Apache-2.0

// Package keeper holds directories of KV files that an engine fills and never empties at a limit: those of vLLM's
// fs offloading tier (as in 0.32) and those of LMCache's fs adapters.
//
//	ROOT/MODEL_HASH12/config.json                    names the model
//	ROOT/MODEL_HASH12_rRANK/HHH/HH_gGROUP/HASH.bin   vLLM: one chunk each; HHH and HH begin HASH
//	ROOT/MODEL@0xRANK@GROUP@HASH[@SALT].data         LMCache
//
// The keeper unlinks the least recently used files, and of the files that one thread wrote or read in one go the last one
// first, since a chunk is of use only with those before it. It writes nothing into a directory and touches neither
// directories, config.json nor temporary files younger than an hour. Engines take an unlinked file for a miss.
//
// The kernel reports reads and writes: by fanotify for the whole file system where that is allowed, else by inotify up to
// its limit of watches. What neither reports is found by looking at the directory again and by access times.
package keeper
