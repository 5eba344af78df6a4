// SPDX-License-Identifier: Apache-2.0

// Command formats records the files that a release writes, for cmd/kvasir/internal/cli/testdata/formats: pool index, note of registrations,
// disk, directory with its attributes, Redis values, settings of tenants, registry, KV events, generations.
//
//	git worktree add /tmp/release COMMIT && (cd /tmp/release && go build -o /tmp/kvasir-release ./cmd/kvasir)
//	go run ./interop/formats -binary /tmp/kvasir-release -commit COMMIT -to cmd/kvasir/internal/cli/testdata/formats/0.1.0
//
// It needs redis-server. cmd/kvasir/internal/cli has the test that reads what it records.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// recorded is recorded.json: what is no file.
type recorded struct {
	Prompt     string            // words, which the engine makes tokens of
	Answer     string            // its answer
	Attributes map[string]string // of the directory's files by name, hexadecimal
	Redis      map[string]string // values by name, hexadecimal
	S3         map[string]object // of a bucket, by name
	Events     []string          // payloads of KV events, hexadecimal
}

// object is an object of the bucket.
type object struct{ Meta, Body string } // x-amz-meta-kvasir; hexadecimal

// bucket is an object store that keeps what is put, /b.
type bucket struct {
	mu  sync.Mutex
	all map[string]object
}

func (s *bucket) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/b"), "/")
	s.mu.Lock()
	defer s.mu.Unlock()
	o, there := s.all[name]
	switch {
	case r.Method == http.MethodPut:
		b, err := io.ReadAll(r.Body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		s.all[name] = object{r.Header.Get("X-Amz-Meta-Kvasir"), hex.EncodeToString(b)}
	case name == "":
		fmt.Fprint(w, "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
	case !there:
		w.WriteHeader(http.StatusNotFound)
	default:
		b, _ := hex.DecodeString(o.Body) // it was encoded here
		w.Header().Set("X-Amz-Meta-Kvasir", o.Meta)
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b)
	}
}

// objects are those with the chunks.
func (s *bucket) objects() map[string]object {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]object{}
	for name, o := range s.all {
		if o.Meta != "" {
			out[name] = o
		}
	}
	return out
}

type recorder struct {
	binary, dir string
	ended       []func()
	out         recorded
}

func main() {
	binary := flag.String("binary", "", "the release's build")
	commit := flag.String("commit", "", "its commit")
	to := flag.String("to", "", "directory of testdata")
	flag.Parse()
	if err := run(*binary, *commit, *to); err != nil {
		fmt.Fprintln(os.Stderr, "formats:", err)
		os.Exit(1)
	}
}

func run(binary, commit, to string) (err error) {
	if len(commit) != 40 || to == "" {
		return errors.New("-commit needs 40 digits, -to a directory")
	}
	dir, err := os.MkdirTemp("", "kvasir-formats-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	r := &recorder{binary: binary, dir: dir}
	defer func() {
		for _, f := range slices.Backward(r.ended) {
			f()
		}
	}()
	if err := r.play(); err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(&r.out, "", " ")
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(filepath.Join(to, "COMMIT"), []byte(commit+"\n"), 0o644), os.WriteFile(filepath.Join(to, "recorded.json"), append(text, '\n'), 0o644),
		pack(filepath.Join(to, "files.tar.gz"), dir))
}

// start starts a process; end sends it a signal and waits.
func (r *recorder) start(name string, args ...string) (end func(os.Signal), err error) {
	cmd := exec.Command(name, args...)
	cmd.Stderr, cmd.Env = os.Stderr, append(os.Environ(), "VLLM_HOST_IP=127.0.0.1", "AWS_ACCESS_KEY_ID=id", "AWS_SECRET_ACCESS_KEY=secret")
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var once sync.Once
	end = func(sig os.Signal) {
		once.Do(func() {
			_ = cmd.Process.Signal(sig) // it may have ended
			_ = cmd.Wait()
		})
	}
	r.ended = append(r.ended, func() { end(os.Kill) })
	return end, nil
}

// freePort returns a port without a listener, none of those that the kernel gives to connections.
func freePort() string {
	for {
		port := strconv.Itoa(20000 + rand.IntN(10000))
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			_ = l.Close()
			return port
		}
	}
}

func await(what string, f func() error) (err error) {
	for range 300 {
		if err = f(); err == nil {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func ask(method, url, body string) ([]byte, error) {
	q, err := http.NewRequestWithContext(context.Background(), method, url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	a, err := http.DefaultClient.Do(q)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err == nil && a.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, url, a.Status, b)
	}
	return b, err
}

func (r *recorder) play() error {
	at := func(name string) string { return filepath.Join(r.dir, name) }
	port, web, engine, registry, redis, events := freePort(), freePort(), freePort(), freePort(), freePort(), freePort()
	shm := "/dev/shm/lmcache_l1_pool_kvasir_formats" + port
	defer func() {
		for _, suffix := range []string{"", ".kvasir", ".workers"} {
			_ = os.Remove(shm + suffix)
		}
	}()
	if _, err := r.start("redis-server", "--port", redis, "--bind", "127.0.0.1", "--save", "", "--dir", r.dir); err != nil {
		return err
	}
	if err := await("redis-server", func() error { _, err := values(redis); return err }); err != nil {
		return err
	}
	objects := &bucket{all: map[string]object{}}
	web3 := httptest.NewServer(objects)
	defer web3.Close()
	endRegistry, err := r.start(r.binary, "bootstrap", "--port", registry, "--state", at("registry"))
	if err != nil {
		return err
	}
	endServer, err := r.start(r.binary, "server", "--host", "127.0.0.1", "--port", port, "--http-port", web, "--l1-size-gb", "1MiB", "--chunk-size", "64",
		"--shm-name", "kvasir_formats"+port, "--disk", at("disk"), "--disk-gb", "0.0625", "--disk-first-touch", "--state", at("tenants"),
		"--l2-adapter", fmt.Sprintf(`{"type":"fs","base_path":%q}`, at("fs")), "--l2-adapter", `{"type":"redis","host":"127.0.0.1","port":`+redis+`}`,
		"--l2-adapter", fmt.Sprintf(`{"type":"s3_native","s3_endpoint":%q,"s3_bucket":"b"}`, web3.URL),
		"--kv-events", "tcp://127.0.0.1:"+events)
	if err != nil {
		return err
	}
	if err := await("server", func() error { _, err := ask("GET", "http://127.0.0.1:"+web+"/readyz", ""); return err }); err != nil {
		return err
	}
	defer r.follow(events)()
	config := fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":"kv_both","engine_id":"p","kv_connector_extra_config":{"connectors":[
		{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_connector_extra_config":{"bootstrap_server_address":"127.0.0.1:%s"}},
		{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.server_urls":"tcp://127.0.0.1:%s"}}]}}`, registry, port)
	if _, err := r.start(r.binary, "engine", "--port", engine, "--layers", "2", "--kv-heads", "1", "--head-bytes", "8", "--num-gpu-blocks-override", "64",
		"--max-model-len", "1000", "--model", "m", "--kv-transfer-config", config); err != nil {
		return err
	}
	if err := await("engine", func() error { _, err := ask("GET", "http://127.0.0.1:"+engine+"/health", ""); return err }); err != nil {
		return err
	}
	if _, err := ask("PUT", "http://127.0.0.1:"+web+"/tenants/team", `{"quota_bytes":65536,"ttl_seconds":3600}`); err != nil {
		return err
	}
	var words []string
	for i := range 330 {
		words = append(words, strconv.Itoa(i))
	}
	r.out.Prompt = strings.Join(words, " ")
	b, err := ask("POST", "http://127.0.0.1:"+engine+"/v1/completions", fmt.Sprintf(`{"model":"m","prompt":%q,"max_tokens":8}`, r.out.Prompt))
	if err != nil {
		return err
	}
	var answer struct{ Choices []struct{ Text string } }
	if err := json.Unmarshal(b, &answer); err != nil {
		return err
	}
	r.out.Answer = answer.Choices[0].Text
	err = await("values in Redis", func() (err error) {
		if r.out.Redis, err = values(redis); err == nil && len(r.out.Redis) < 5 {
			err = fmt.Errorf("%d values", len(r.out.Redis))
		}
		return err
	})
	if err != nil {
		return err
	}
	err = await("objects in the bucket", func() error {
		if r.out.S3 = objects.objects(); len(r.out.S3) < 5 {
			return fmt.Errorf("%d objects", len(r.out.S3))
		}
		return nil
	})
	if err != nil {
		return err
	}
	time.Sleep(3 * time.Second) // checksums of the pool, the note, events
	for name, suffix := range map[string]string{"pool": "", "pool.kvasir": ".kvasir", "pool.workers": ".workers"} {
		if err := copyFile(shm+suffix, at(name)); err != nil { // as a kill leaves them
			return err
		}
	}
	endServer(syscall.SIGTERM)
	endRegistry(syscall.SIGTERM)
	return errors.Join(r.attributes(at("fs")), r.generations(at("cleared")))
}

// generations makes the file that a clear leaves in a directory.
func (r *recorder) generations(dir string) error {
	port, web := freePort(), freePort()
	end, err := r.start(r.binary, "server", "--host", "127.0.0.1", "--port", port, "--http-port", web, "--l1-size-gb", "1MiB", "--chunk-size", "64",
		"--shm-name", "kvasir_formats"+port, "--l2-adapter", fmt.Sprintf(`{"type":"fs","base_path":%q}`, dir))
	if err != nil {
		return err
	}
	defer func() {
		for _, suffix := range []string{"", ".kvasir", ".workers"} {
			_ = os.Remove("/dev/shm/lmcache_l1_pool_kvasir_formats" + port + suffix)
		}
	}()
	if err := await("server", func() error { _, err := ask("GET", "http://127.0.0.1:"+web+"/readyz", ""); return err }); err != nil {
		return err
	}
	if _, err := ask("POST", "http://127.0.0.1:"+web+"/cache/clear", `{"force":true}`); err != nil {
		return err
	}
	end(syscall.SIGTERM)
	return nil
}

// follow collects the payloads of KV events.
func (r *recorder) follow(port string) (stop func()) {
	sub := zmtp.NewSub("tcp://127.0.0.1:"+port, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		if len(m) == 3 {
			r.out.Events = append(r.out.Events, hex.EncodeToString(m[2]))
		}
	}})
	_ = sub.Subscribe("") // short enough
	_ = sub.Start()       // the address is well formed
	return func() { _ = sub.Close() }
}

func (r *recorder) attributes(dir string) error {
	r.out.Attributes = map[string]string{}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b := make([]byte, 1024)
		if n, err := syscall.Getxattr(path, "user.kvasir.x3", b); err == nil {
			r.out.Attributes[filepath.Base(path)] = hex.EncodeToString(b[:n])
		}
		return nil
	})
}

// values are all strings of a Redis.
func values(port string) (map[string]string, error) {
	cli := func(args ...string) ([]byte, error) {
		return exec.Command("redis-cli", append([]string{"-p", port}, args...)...).Output()
	}
	names, err := cli("KEYS", "*")
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, name := range strings.Fields(string(names)) {
		v, err := cli("GET", name)
		if err != nil {
			return nil, err
		}
		out[name] = hex.EncodeToString(bytes.TrimSuffix(v, []byte("\n")))
	}
	return out, nil
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o600)
}

// pack writes the files of a directory.
func pack(to, dir string) error {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return err
	}
	w := tar.NewWriter(z)
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(text))}); err != nil {
			return err
		}
		_, err = w.Write(text)
		return err
	})
	if err := errors.Join(err, w.Close(), z.Close()); err != nil {
		return err
	}
	return os.WriteFile(to, b.Bytes(), 0o644)
}
