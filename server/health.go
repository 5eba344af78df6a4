// SPDX-License-Identifier: Apache-2.0

package server

// Healthy reports whether the server can serve hits and take stores: it is not shutting down, new workers can map the pool, and the pool
// has its memory.
func (s *Server) Healthy() bool { return len(s.Unhealthy()) == 0 }

// Unhealthy returns the reasons why the server is not healthy; none for a healthy server.
func (s *Server) Unhealthy() []string {
	why := []string{}
	if s.draining.Load() {
		why = append(why, "it is shutting down")
	}
	if s.lost.Load() {
		why = append(why, "the pool's name in /dev/shm was removed: new workers cannot map it")
	}
	if err := s.store.Memory().Trouble(); err != nil {
		why = append(why, err.Error()+"; free some, or start with a smaller --l1-size-gb")
	}
	return why
}

// Awake returns how many workers can load a hit now: they are registered, neither refused nor asleep.
func (s *Server) Awake() int { return s.registry.Awake() }

// Version returns Options.Version.
func (s *Server) Version() string { return s.opts.Version }
