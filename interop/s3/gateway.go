// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// The accounts of a gateway: the owner of the bucket, and two that may only read.
const (
	owner, ownerSecret = "id", "secret"
	readerSecret       = "readers-secret"
)

var readers = []string{"reader", "leaver"}

// gateway runs versitygw, whose program is given, over a directory of its own, with one bucket and the accounts. It prints the
// address and serves until standard input ends. With ca it serves TLS, and writes its authority's certificate to that file.
func gateway(program, bucket, ca string) error {
	dir, err := os.MkdirTemp("", "versitygw-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	scheme, flags, client := "http://", []string(nil), http.DefaultTransport
	if ca != "" {
		cert, key, err := certificateFiles(dir, ca)
		if err != nil {
			return err
		}
		authority, err := os.ReadFile(ca)
		if err != nil {
			return err
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(authority)
		scheme, flags = "https://", []string{"--cert", cert, "--key", key}
		client = &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}
	}
	f := furniture{program: program, bucket: bucket, scheme: scheme, client: &http.Client{Timeout: 10 * time.Second, Transport: client}}
	for try := 1; ; try++ { // others may take the port before the gateway has it
		err := oneGateway(f, flags, filepath.Join(dir, fmt.Sprint(try)))
		if !errors.Is(err, errEnded) || try == 5 {
			return err
		}
	}
}

// errEnded means that the gateway ended before it answered.
var errEnded = errors.New("versitygw has ended")

func oneGateway(f furniture, flags []string, dir string) error {
	objects, users := filepath.Join(dir, "objects"), filepath.Join(dir, "users")
	for _, d := range []string{objects, users} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	addr := l.Addr().String()
	_ = l.Close()
	flags = append([]string{"--port", addr, "--access", owner, "--secret", ownerSecret, "--iam-dir", users, "--quiet", "--keep-alive"}, flags...)
	cmd := exec.Command(f.program, append(flags, "posix", objects)...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	defer func() {
		_ = cmd.Process.Kill()
		<-ended
	}()
	if err := f.furnish(f.scheme+addr, ended); err != nil {
		return err
	}
	fmt.Println(addr)
	input := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(input)
	}()
	select {
	case <-input:
		return nil
	case <-ended:
		return errors.New("versitygw has ended by itself")
	}
}

// furniture is what a gateway begins with: a bucket and accounts.
type furniture struct {
	program, bucket, scheme string
	client                  *http.Client
}

// furnish makes the bucket and the accounts, once the gateway at url answers.
func (f furniture) furnish(url string, ended chan struct{}) error {
	var err error
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		select {
		case <-ended:
			return errEnded
		default:
		}
		if err = f.put(url+"/"+f.bucket, ""); err == nil {
			break
		}
		if time.Now().After(end) {
			return err
		}
	}
	for _, name := range readers {
		out, err := exec.Command(f.program, "admin", "--allow-insecure", "--access", owner, "--secret", ownerSecret, "--endpoint-url", url, "create-user", "--access", name, "--secret", readerSecret, "--role", "user").CombinedOutput()
		if err != nil {
			return fmt.Errorf("make user %s: %w: %s", name, err, out)
		}
	}
	return f.put(url+"/"+f.bucket+"?policy=", fmt.Sprintf(`{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"AWS":["%s","%s"]},"Action":["s3:GetObject","s3:ListBucket"],"Resource":["arn:aws:s3:::%s","arn:aws:s3:::%s/*"]}]}`,
		readers[0], readers[1], f.bucket, f.bucket))
}

// put sends one signed request.
func (f furniture) put(url, body string) error {
	r, err := http.NewRequest(http.MethodPut, url, bytes.NewReader([]byte(body)))
	if err != nil {
		return err
	}
	const unsigned = "UNSIGNED-PAYLOAD"
	r.Header.Set("X-Amz-Content-Sha256", unsigned)
	keys := aws.Credentials{AccessKeyID: owner, SecretAccessKey: ownerSecret}
	if err := v4.NewSigner().SignHTTP(context.Background(), keys, r, unsigned, "s3", "us-east-1", time.Now()); err != nil {
		return err
	}
	a, err := f.client.Do(r)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(a.Body, 1000))
	if a.StatusCode/100 != 2 {
		return fmt.Errorf("PUT %s: %s: %s", url, a.Status, text)
	}
	return nil
}
