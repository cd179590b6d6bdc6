import Foundation

public enum GenerateStopReason: Sendable {
    case stop, length, cancelled
}

public struct GenerateCompletionInfo: Sendable {
    public let promptTokenCount: Int
    public let generationTokenCount: Int
    public let promptTime: TimeInterval
    public let generateTime: TimeInterval
    public let stopReason: GenerateStopReason

    public var tokensPerSecond: Double { Double(generationTokenCount) / generateTime }

    public init(
        promptTokenCount: Int, generationTokenCount: Int, promptTime: TimeInterval,
        generationTime: TimeInterval, stopReason: GenerateStopReason = .stop
    ) {
        self.promptTokenCount = promptTokenCount
        self.generationTokenCount = generationTokenCount
        self.promptTime = promptTime
        self.generateTime = generationTime
        self.stopReason = stopReason
    }
}

/// What a generation gives.
public enum Generation: Sendable {
    case chunk(String)
    case info(GenerateCompletionInfo)
    case toolCall(ToolCall)

    public var chunk: String? {
        if case .chunk(let text) = self { text } else { nil }
    }

    public var info: GenerateCompletionInfo? {
        if case .info(let info) = self { info } else { nil }
    }

    public var toolCall: ToolCall? {
        if case .toolCall(let call) = self { call } else { nil }
    }
}

private struct Sent<Value>: @unchecked Sendable {
    var value: Value
}

/// Runs an iterator to a stop token or its end, as text, and as calls where there are tools; the task ends when nothing computes any more.
public func generateTask<TOKEN: TokenIteratorProtocol>(
    promptTokenCount: Int, modelConfiguration: ModelConfiguration, tokenizer: any Tokenizer,
    iterator: consuming TOKEN, tools: [ToolSpec]? = nil
) -> (AsyncStream<Generation>, Task<Void, Never>) {
    let (stream, continuation) = AsyncStream<Generation>.makeStream()
    var stops = modelConfiguration.eosTokenIds
    stops.formUnion(modelConfiguration.extraEOSTokens.compactMap(tokenizer.convertTokenToId))
    stops.formUnion([tokenizer.eosTokenId, tokenizer.unknownTokenId].compactMap { $0 })
    let sent = Sent<any TokenIteratorProtocol>(value: iterator), ends = stops
    let hasTools = tools != nil
    let task = Task {
        var iterator = sent.value, text = NaiveStreamingDetokenizer(tokenizer: tokenizer)
        var count = 0, reason = GenerateStopReason.length, held = ""
        let start = Date()
        while let token = iterator.next() {
            if Task.isCancelled {
                reason = .cancelled
                break
            }
            if ends.contains(token) {
                reason = .stop
                break
            }
            count += 1
            text.append(token: token)
            guard let chunk = text.next() else { continue }
            // What may be a call is held back until it is one.
            held += chunk
            var part = Generation.chunk(held)
            if hasTools, held.hasPrefix("<") {
                guard let call = ToolCall(text: held) else { continue }
                part = .toolCall(call)
            }
            held = ""
            if case .terminated = continuation.yield(part) {
                reason = .cancelled
                break
            }
        }
        continuation.yield(
            .info(
                GenerateCompletionInfo(
                    promptTokenCount: promptTokenCount, generationTokenCount: count,
                    promptTime: iterator.promptPrefillTime,
                    generationTime: Date().timeIntervalSince(start), stopReason: reason)))
        continuation.finish()
    }
    continuation.onTermination = { if case .cancelled = $0 { task.cancel() } }
    return (stream, task)
}
