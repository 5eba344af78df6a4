// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/tier/fs"
)

// layout is how a directory names its files.
type layout uint8

const (
	vllmLayout    layout = iota // HHH/HH_gGROUP/HASH.bin below a directory for each rank
	lmcacheLayout               // MODEL@0xRANK@GROUP@HASH[@SALT].data, all in one directory
)

func (l layout) String() string {
	if l == vllmLayout {
		return "vllm"
	}
	return "lmcache"
}

// id names a file inside its directory: the hash and group of a vLLM file, or the hash of an LMCache file's name.
type id struct {
	hash  [32]byte
	bytes uint8 // length of hash
	group uint16
}

const (
	leastHash = 8 // bytes of the shortest hash in a name
	vllmEnd   = ".bin"
	lmcEnd    = ".data"
	tempEnd   = ".tmp"
)

// vllmID parses the name of a file. It reports false if vLLM gives no chunk such a name.
func vllmID(name string) (k id, ok bool) {
	digits, found := strings.CutSuffix(name, vllmEnd)
	if !found || len(digits) < 2*leastHash || len(digits) > 2*len(k.hash) || strings.ToLower(digits) != digits {
		return id{}, false
	}
	n, err := hex.Decode(k.hash[:], []byte(digits))
	k.bytes = uint8(n)
	return k, err == nil
}

// leaf is the directory of a vLLM file, below the directory of its rank.
func (k id) leaf() string {
	digits := hex.EncodeToString(k.hash[:3])
	return digits[:3] + "/" + digits[3:5] + "_g" + strconv.Itoa(int(k.group))
}

func (k id) name() string { return hex.EncodeToString(k.hash[:k.bytes]) + vllmEnd }

// leafGroup reads HHH/HH_gGROUP. It reports false for other directories.
func leafGroup(path string) (group uint16, ok bool) {
	top, leaf, found := strings.Cut(path, "/")
	digits, number, marked := strings.Cut(leaf, "_g")
	if !found || !marked || !isHex(top, 3) || !isHex(digits, 2) {
		return 0, false
	}
	n, err := strconv.ParseUint(number, 10, 16)
	return uint16(n), err == nil
}

// inLeaf adds the group from the directory of the file, HHH/HH_gGROUP. It reports false if the hash does not begin with HHHHH.
func (k id) inLeaf(path string) (id, bool) {
	group, ok := leafGroup(path)
	k.group = group
	return k, ok && k.leaf() == path
}

// lmcacheID reads the name of a file of LMCache's fs adapters. Up to 0.4.6 names have no group.
func lmcacheID(name string) (id, bool) {
	text, found := strings.CutSuffix(name, lmcEnd)
	parts := strings.Split(text, "@")
	if !found || len(parts) < 3 || len(parts) > 5 || parts[0] == "" || !isHexUpTo(strings.TrimPrefix(parts[1], "0x"), 16) {
		return id{}, false
	}
	grouped := len(parts) > 3 && isHexUpTo(parts[2], 16) && isChunkHash(parts[3])
	if !grouped && (len(parts) > 4 || !strings.HasPrefix(parts[1], "0x") || !isChunkHash(parts[2])) {
		return id{}, false
	}
	k := id{bytes: 16}
	sum := xxh3.HashString128(name).Bytes()
	copy(k.hash[:], sum[:])
	return k, true
}

// idIn reads the name of a file in the directory of a rank, or in the root, whose rank is "".
func idIn(rank, leaf, name string) (id, bool) {
	if rank == "" {
		return lmcacheID(name)
	}
	k, ok := vllmID(name)
	if !ok {
		return id{}, false
	}
	return k.inLeaf(leaf)
}

// named reports whether engines give files such a name, in any directory.
func named(name string) bool {
	_, vllm := vllmID(name)
	_, lmcache := lmcacheID(name)
	return vllm || lmcache
}

// isChunkHash reports whether a part of an LMCache file's name is a hash.
func isChunkHash(s string) bool { return len(s) >= 2*leastHash && isHexUpTo(s, 128) }

func isHex(s string, digits int) bool { return len(s) == digits && isHexUpTo(s, digits) }

func isHexUpTo(s string, most int) bool {
	return s != "" && len(s) <= most && strings.Trim(s, "0123456789abcdef") == ""
}

// rankDirectory splits MODEL_HASH12_rRANK. It reports false for other names.
func rankDirectory(name string) (base string, ok bool) {
	i := strings.LastIndex(name, "_r")
	if i < 0 {
		return "", false
	}
	if _, err := strconv.ParseUint(name[i+2:], 10, 31); err != nil {
		return "", false
	}
	base = name[:i]
	u := strings.LastIndexByte(base, '_')
	return base, u > 0 && isHex(base[u+1:], 12)
}

// maxConfigBytes bounds the bytes read of a config.json; a longer one cannot be read. That of a model with many layers and groups has some
// 100 KB.
const maxConfigBytes = 4 << 20

// modelOf returns the model that BASE/config.json names.
func modelOf(root, base string) (string, error) {
	f, err := os.OpenFile(filepath.Join(root, base, "config.json"), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var c struct {
		Model         string `json:"model_name"`
		BlocksPerFile *int   `json:"blocks_per_file"`
	}
	if err := json.NewDecoder(io.LimitReader(f, maxConfigBytes)).Decode(&c); err != nil {
		return "", fmt.Errorf("%s: %w", f.Name(), err)
	}
	if c.Model == "" || c.BlocksPerFile == nil {
		return "", fmt.Errorf("%s lacks model_name or blocks_per_file", f.Name())
	}
	return c.Model, nil
}

// checkRoot fails for a directory that is not an engine's. An empty directory passes, since an engine may begin in it. Several engines may
// share one.
func checkRoot(root string) error {
	f, err := os.Open(root)
	if err != nil {
		return err
	}
	defer f.Close()
	var missing error
	empty := true
	for {
		entries, err := f.ReadDir(1024)
		switch {
		case errors.Is(err, io.EOF) && empty:
			return nil
		case errors.Is(err, io.EOF) && missing != nil:
			return fmt.Errorf("%s is no directory of vLLM's fs tier: %w", root, missing)
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%s is no directory of vLLM's fs tier (no MODEL_HASH/config.json in it) and none of LMCache's fs adapters (no MODEL@RANK@GROUP@HASH.data)", root)
		case err != nil:
			return err
		}
		for _, e := range entries {
			ok, err := isEngines(root, e)
			if ok {
				return nil
			}
			// The directory of a new file system, and files that a node writes before its first object.
			empty = empty && (e.Name() == "lost+found" || fs.BesideObjects(e.Name()))
			missing = cmp.Or(err, missing)
		}
	}
}

// isEngines reports whether the entry e of a root is one that only an engine makes. The error says what a directory of vLLM lacks.
func isEngines(root string, e os.DirEntry) (bool, error) {
	name := e.Name()
	if !e.IsDir() {
		_, ok := lmcacheID(name)
		return ok && e.Type().IsRegular(), nil
	}
	base, isRank := rankDirectory(name)
	if !isRank {
		base = name
	}
	_, err := modelOf(root, base)
	if err != nil && !isRank && errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
