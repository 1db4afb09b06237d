// Command chat sends one chat prompt to a Pagemill gateway and prints the answer as it comes.
//
//	chat PROMPT [MAX_TOKENS]
//
// The answer goes to stdout, everything else to stderr. Exit status: 0 answered, 1 failed, 2 wrong usage, 75 failed
// but worth another attempt, 130 interrupted.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "pagemill.example/pagemillv1"
)

const deadline = 120 * time.Second

const (
	exitFailed      = 1
	exitUsage       = 2
	exitTryAgain    = 75
	exitInterrupted = 130
)

func main() {
	request, ok := parse(os.Args[1:])
	if !ok {
		fmt.Fprintln(os.Stderr, "usage: chat PROMPT [MAX_TOKENS]")
		os.Exit(exitUsage)
	}
	target := os.Getenv("PAGEMILL_TARGET")
	if target == "" {
		target = "127.0.0.1:50051"
	}
	accepted, err := generate(target, request)
	if err == nil {
		return
	}
	failed := failureOf(err)
	fmt.Fprintln(os.Stderr, failed)
	switch {
	case failed.code == codes.Canceled:
		os.Exit(exitInterrupted)
	case failed.isWorthARetry(accepted):
		os.Exit(exitTryAgain)
	default:
		os.Exit(exitFailed)
	}
}

func parse(args []string) (*pb.GenerateRequest, bool) {
	maxTokens := uint64(256)
	if len(args) == 2 {
		var err error
		if maxTokens, err = strconv.ParseUint(args[1], 10, 32); err != nil {
			return nil, false
		}
	} else if len(args) != 1 {
		return nil, false
	}
	limit := uint32(maxTokens)
	return &pb.GenerateRequest{
		Prompt: &pb.GenerateRequest_Chat{Chat: &pb.ChatPrompt{
			Messages: []*pb.ChatMessage{{Role: "user", Content: args[0]}},
		}},
		Stopping: &pb.StoppingParams{MaxTokens: &limit},
	}, true
}

// generate prints one stream to its end. It also says whether the service had accepted the request.
func generate(target string, request *pb.GenerateRequest) (accepted bool, err error) {
	// Whatever ends the context, Ctrl-C or the deadline, ends the work in the service too.
	ctx, restore := signal.NotifyContext(context.Background(), os.Interrupt)
	defer restore()
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()

	// Pagemill has no TLS yet: clear text is for loopback, Unix sockets and private networks.
	conn, err := grpc.Dial(target, grpc.WithInsecure())
	if err != nil {
		return false, err
	}
	defer conn.Close()

	stream, err := pb.NewInferenceServiceClient(conn).Generate(ctx, request)
	if err != nil {
		return false, err
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return accepted, nil
		}
		if err != nil {
			return accepted, err
		}
		accepted = true // the first message is always Accepted
		show(message)
	}
}

func show(message *pb.GenerateResponse) {
	switch event := message.Event.(type) {
	case *pb.GenerateResponse_Delta:
		fmt.Print(event.Delta.Text)
	case *pb.GenerateResponse_Finished:
		usage := event.Finished.Usage
		fmt.Println()
		fmt.Fprintf(os.Stderr, "%v: %d prompt tokens (%d cached), %d generated\n",
			event.Finished.Reason, usage.PromptTokens, usage.CachedTokens, usage.CompletionTokens)
	}
}
