// SPDX-License-Identifier: Apache-2.0

// Package keeper keeps directories of KV files below a limit. Engines fill them and never delete files: the directories of vLLM's
// fs offloading tier (as in 0.32) and those of LMCache's fs adapters.
//
//	ROOT/MODEL_HASH12/config.json                    names the model
//	ROOT/MODEL_HASH12_rRANK/HHH/HH_gGROUP/HASH.bin   vLLM: one chunk each; HHH and HH begin HASH
//	ROOT/MODEL@0xRANK@GROUP@HASH[@SALT].data         LMCache
//
// The keeper unlinks the least recently used files. Of the files that one thread wrote or read in one go it unlinks the last one
// first, since a chunk is of use only with the chunks before it. It writes nothing into a directory. It never removes
// directories, config.json or temporary files younger than an hour. For an engine an unlinked file is a miss.
//
// The kernel reports reads and writes: by fanotify for the whole file system if that is allowed, else by inotify up to
// its limit of watches. To find uses that neither reports, the keeper looks at the directories again and at access times.
package keeper
