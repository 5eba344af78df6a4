package bootstrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// The state file is one line of header and one of JSON:
//
//	kvasir-bootstrap 1 CRC32C-of-the-JSON-in-hex
//	{"generation":…,"engines":[…]}
//
// It is replaced as a whole: written beside, synced, renamed, the folder synced.

// StateError is a state file that cannot be used.
type StateError struct {
	Path   string
	Reason string
}

func (e *StateError) Error() string {
	return fmt.Sprintf("state file %s: %s; remove it to start with an empty registry", e.Path, e.Reason)
}

const (
	stateMagic    = "kvasir-bootstrap 1 "
	maxStateBytes = 64 << 20
	saveEvery     = 50 * time.Millisecond // writes in between are one
	saveRetry     = 5 * time.Second       // after an error
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type savedState struct {
	Generation uint64        `json:"generation"`
	Engines    []savedEngine `json:"engines"`
}

type savedEngine struct {
	ID      string        `json:"engine_id"`
	DP      int           `json:"dp_rank"`
	TPSize  int           `json:"tp_size,omitempty"`
	PPSize  int           `json:"pp_size,omitempty"`
	Workers []savedWorker `json:"workers"`
	Missing []savedRank   `json:"missing,omitempty"`
}

type savedWorker struct {
	TP     int           `json:"tp_rank"`
	PP     int           `json:"pp_rank"`
	Addr   string        `json:"addr"`
	Remote bool          `json:"remote,omitempty"`
	Lease  time.Duration `json:"lease_ns,omitempty"`
}

type savedRank struct {
	TP  int  `json:"tp_rank"`
	PP  int  `json:"pp_rank"`
	Own bool `json:"own,omitempty"`
}

// stateFile is an open state file. One process at a time has it.
type stateFile struct {
	path string
	lock *os.File
}

// openState locks the file and reads it. A file that is not there is empty.
func openState(path string, maxWorkers int) (*stateFile, []savedEngine, uint64, error) {
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, nil, 0, fmt.Errorf("lock state file: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		lock.Close()
		return nil, nil, 0, fmt.Errorf("state file %s is in use by another process: %w", path, err)
	}
	f := &stateFile{path: path, lock: lock}
	st, err := readState(path)
	if err == nil {
		err = st.check(path, maxWorkers)
	}
	if err != nil {
		return nil, nil, 0, errors.Join(err, f.close())
	}
	return f, st.Engines, st.Generation, nil
}

func (f *stateFile) close() error { return f.lock.Close() }

func readState(path string) (st savedState, _ error) {
	in, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return st, nil
	}
	if err != nil {
		return st, fmt.Errorf("read state file: %w", err)
	}
	defer in.Close()
	b, err := io.ReadAll(io.LimitReader(in, maxStateBytes+1))
	if err != nil {
		return st, fmt.Errorf("read state file: %w", err)
	}
	if len(b) > maxStateBytes {
		return st, &StateError{path, fmt.Sprintf("longer than %d bytes", maxStateBytes)}
	}
	st, reason := decodeState(b)
	if reason != "" {
		return st, &StateError{path, reason}
	}
	return st, nil
}

func decodeState(b []byte) (st savedState, reason string) {
	head, text, ok := bytes.Cut(b, []byte("\n"))
	sum, known := bytes.CutPrefix(head, []byte(stateMagic))
	if !known {
		return st, "not a state file of this version"
	}
	if text = bytes.TrimSuffix(text, []byte("\n")); !ok || string(sum) != fmt.Sprintf("%08x", crc32.Checksum(text, castagnoli)) {
		return st, "damaged: the checksum does not fit"
	}
	if err := json.Unmarshal(text, &st); err != nil {
		return st, "damaged: " + err.Error()
	}
	return st, ""
}

func encodeState(st savedState) ([]byte, error) {
	text, err := json.Marshal(st)
	if err != nil {
		return nil, err
	}
	b := fmt.Appendf(nil, "%s%08x\n", stateMagic, crc32.Checksum(text, castagnoli))
	return append(append(b, text...), '\n'), nil
}

// check refuses what the registry could not have written.
func (st *savedState) check(path string, maxWorkers int) error {
	workers := 0
	dps := map[int]bool{}
	for _, e := range st.Engines {
		seen := map[ranks]bool{}
		for _, w := range e.Workers {
			at := ranks{w.TP, w.PP}
			if seen[at] || len(w.Addr) > MaxAddrBytes || w.Lease < 0 || w.Lease > MaxLease {
				return &StateError{path, fmt.Sprintf("damaged: worker tp_rank %d pp_rank %d of engine %q", w.TP, w.PP, e.ID)}
			}
			seen[at] = true
		}
		if dps[e.DP] || len(e.Workers) == 0 || len(e.ID) > MaxEngineIDBytes {
			return &StateError{path, fmt.Sprintf("damaged: engine %q of dp_rank %d", e.ID, e.DP)}
		}
		dps[e.DP] = true
		workers += len(e.Workers)
	}
	if workers > maxWorkers {
		return &StateError{path, fmt.Sprintf("has %d workers, the limit is %d", workers, maxWorkers)}
	}
	return nil
}

// restore fills the registry before it starts. Leases begin anew.
func (r *Registry) restore(engines []savedEngine) {
	now := time.Now()
	for _, s := range engines {
		e := newEngine(s.ID, s.DP)
		e.tpSize, e.ppSize = s.TPSize, s.PPSize
		for _, m := range s.Missing {
			e.missing[ranks{m.TP, m.PP}] = m.Own
			e.settled = now.Add(r.o.Settle)
		}
		for _, w := range s.Workers {
			in := &worker{ranks: ranks{w.TP, w.PP}, addr: w.Addr, remote: w.Remote, lease: w.Lease, expires: now.Add(w.Lease)}
			e.add(in)
			if in.lease > 0 {
				r.dueLocked(in.expires)
			}
		}
		if !e.settled.IsZero() {
			r.dueLocked(e.settled)
		}
		r.mu.engines = append(r.mu.engines, e)
		r.mu.byDP[e.dp] = e
		r.mu.workers += len(e.byRank)
	}
	if len(engines) > 0 {
		r.log.Info(fmt.Sprintf("%d engines with %d workers from %s", len(engines), r.mu.workers, r.o.StateFile))
	}
}

// saved copies the registry for the state file.
func (r *Registry) saved() savedState {
	gen := r.current().gen
	r.mu.Lock()
	defer r.mu.Unlock()
	st := savedState{Generation: gen, Engines: []savedEngine{}}
	for _, e := range r.mu.engines {
		s := savedEngine{ID: e.id, DP: e.dp, TPSize: e.tpSize, PPSize: e.ppSize}
		for _, row := range e.rows {
			for _, w := range row.workers {
				s.Workers = append(s.Workers, savedWorker{w.tp, w.pp, w.addr, w.remote, w.lease})
			}
		}
		for at, own := range e.missing {
			s.Missing = append(s.Missing, savedRank{at.tp, at.pp, own})
		}
		st.Engines = append(st.Engines, s)
	}
	return st
}

// keep writes the state file after changes, without a lock held, several changes
// at once when they come fast, and a last time when the registry closes.
func (r *Registry) keep() {
	for {
		select {
		case <-r.closing:
			if len(r.save) > 0 {
				r.write()
			}
			return
		case <-r.save:
		}
		for saved := false; !saved; {
			pause := saveEvery
			if saved = r.write(); !saved {
				pause = saveRetry
			}
			select {
			case <-time.After(pause):
			case <-r.closing:
				if !saved || len(r.save) > 0 {
					r.write()
				}
				return
			}
		}
	}
}

// write replaces the state file and reports whether that went well.
func (r *Registry) write() bool {
	err := r.file.write(r.saved())
	if err == nil {
		if r.n.unsaved.Swap(false) {
			r.log.Info("the state file is up to date again: " + r.file.path)
		}
		return true
	}
	r.n.saveErrors.Add(1)
	if !r.n.unsaved.Swap(true) {
		r.log.Warn(fmt.Sprintf("state file %s is out of date, the registry goes on: %v", r.file.path, err))
	}
	return false
}

func (f *stateFile) write(st savedState) (err error) {
	b, err := encodeState(st)
	if err != nil {
		return err
	}
	tmp := f.path + ".tmp"
	out, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = out.Write(b)
	if err == nil {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if err := os.Rename(tmp, f.path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(f.path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
