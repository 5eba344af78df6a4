// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/tier"
)

func (v *volume) checkpointDue() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.mu.all-v.checked > max(checkpointPer*entryBytes*int64(v.mu.index.len()), v.segment)
}

// checkpoint writes the indexes of the sealed segments to one file, because one file can be read faster
// than many.
func (v *volume) checkpoint() error {
	segments := v.sealedSegments()
	written := int64(0)
	err := replace(v.files, checkName, func(put func([]byte) error) error {
		b := shm.MakeAligned(block, block)
		v.mu.Lock()
		putMark(b, checkMagic, v.id, v.mu.wear)
		v.mu.Unlock()
		if err := put(b); err != nil {
			return err
		}
		for _, s := range segments {
			if !v.retain(s) {
				continue
			}
			b := v.part(s)
			v.release(s)
			if len(b) == 0 {
				continue
			}
			if err := put(b); err != nil {
				return err
			}
			written += int64(len(b))
		}
		return v.save() // deletions that the checkpoint leaves out must be durable before it replaces the old one
	})
	v.wrote(written + block)
	v.mu.Lock()
	v.checked = v.mu.all
	if err == nil {
		v.mu.checkpoint = written + block
	}
	v.mu.Unlock()
	return errors.Join(err, v.compact())
}

// part returns a segment's part of a checkpoint, nil if the segment's index cannot be read.
func (v *volume) part(s *segment) []byte {
	t, records, err := readIndex(s.file, s.id, s.size)
	if err != nil {
		return nil
	}
	records = v.live(s, records)
	b := shm.MakeAligned(int(indexBytes(len(records))), block)
	putTrailer(b, putIndex(b[block:], t, records))
	return b
}

// scrub compares all sealed objects with their checksums, at ScrubRate, in one round each scrubEvery.
func (v *volume) scrub() {
	rate := time.Duration(cmp.Or(v.opts.ScrubRate, 8<<20))
	pause := func(d time.Duration) error {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-v.life.Done():
			return v.life.Err()
		}
	}
	paced := func(n int) error {
		v.n.scrubbed.Add(int64(n))
		return pause(time.Duration(n) * time.Second / rate)
	}
	for v.life.Err() == nil {
		began := v.now()
		for _, s := range v.sealedSegments() {
			if v.retain(s) {
				v.scrubSegment(s, paced)
				v.release(s)
			}
		}
		_ = pause(max(time.Minute, scrubEvery-v.now().Sub(began)))
	}
}

func (v *volume) scrubSegment(s *segment, paced func(int) error) {
	records, err := v.recordsOf(s)
	if err != nil {
		records = v.walk(s)
	}
	for _, r := range records {
		if v.life.Err() != nil {
			return
		}
		if len(v.live(s, []record{r})) == 0 {
			continue
		}
		if err := v.verify(v.life, s, &r, paced); err != nil && v.life.Err() == nil {
			v.dropDamaged(s, &r, err)
			_ = paced(min(int(r.len), bouncePiece)) // the piece that revealed the fault
		}
	}
}

// refuse returns tier.ErrNotKept for the reason `why`, and counts the reason.
func (v *volume) refuse(why error) error {
	switch {
	case errors.Is(why, errBudget):
		v.n.overBudget.Add(1)
		why = fmt.Errorf("%w: %w", tier.ErrBudget, why)
	case errors.Is(why, errLarge):
		v.n.tooLarge.Add(1)
	case errors.Is(why, errFull):
		v.n.noRoom.Add(1)
		why = fmt.Errorf("%w: %w", tier.ErrFull, why)
	default:
		v.n.noRoom.Add(1)
	}
	return fmt.Errorf("%w: %s: %w", tier.ErrNotKept, v.dir.Path, why)
}
