// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"crypto/tls"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// certificateInterval is the shortest time between two checks of the files.
const certificateInterval = 5 * time.Second

// Certificate is a TLS certificate and its key. They are read again when their files change. Its methods are safe for concurrent use.
type Certificate struct {
	cert, key string // paths

	mu struct {
		sync.Mutex
		now    *tls.Certificate
		files  [2]os.FileInfo // the files from which `now` was read
		looked time.Time
	}
}

// OpenCertificate reads a certificate and its key, in PEM.
func OpenCertificate(cert, key string) (*Certificate, error) {
	p := &Certificate{cert: cert, key: key}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p, p.readLocked(time.Now())
}

func (p *Certificate) readLocked(now time.Time) error {
	p.mu.looked = now
	var files [2]os.FileInfo
	changed := p.mu.now == nil
	for i, path := range []string{p.cert, p.key} {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		files[i] = info
		// After a change of a link there can be another file with an equal time.
		changed = changed || !os.SameFile(info, p.mu.files[i]) || !info.ModTime().Equal(p.mu.files[i].ModTime())
	}
	if !changed {
		return nil
	}
	if err := auth.CheckPrivate(p.key); err != nil {
		return err
	}
	c, err := tls.LoadX509KeyPair(p.cert, p.key)
	if err != nil {
		return fmt.Errorf("certificate %s: %w", p.cert, err)
	}
	p.mu.now, p.mu.files = &c, files
	return nil
}

// Get implements tls.Config.GetCertificate. If it cannot read the files, for instance because only one of the two has been replaced so
// far, it keeps the former certificate.
func (p *Certificate) Get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := time.Now(); now.Sub(p.mu.looked) >= certificateInterval {
		_ = p.readLocked(now) // if it fails, the former certificate stays
	}
	return p.mu.now, nil
}
