import Foundation
import MLX

public protocol TokenIteratorProtocol: Sequence, IteratorProtocol where Element == Int {
    var maxTokens: Int? { get }
    var tokenCount: Int { get }
    var promptPrefillTime: TimeInterval { get }
}

/// Takes the prompt in, then gives token after token; the next one is computed while this one is
/// read.
public struct TokenIterator: TokenIteratorProtocol {
    let model: any LanguageModel
    var state: LMOutput.State?
    var y: LMInput.Text
    var cache: [KVCache]
    var processor: LogitProcessor?
    let sampler: LogitSampler

    public var tokenCount = 0
    public let maxTokens: Int?
    public var promptPrefillTime: TimeInterval = 0

    public init(
        input: LMInput, model: any LanguageModel, cache: [KVCache]? = nil,
        parameters: GenerateParameters
    ) throws {
        try self.init(
            input: input, model: model, cache: cache ?? model.newCache(parameters: parameters),
            processor: parameters.processor(), sampler: parameters.sampler(),
            prefillStepSize: parameters.prefillStepSize, maxTokens: parameters.maxTokens)
    }

    public init(
        input: LMInput, model: any LanguageModel, cache: [KVCache]? = nil,
        processor: LogitProcessor?, sampler: LogitSampler, prefillStepSize: Int = 512,
        maxTokens: Int? = nil
    ) throws {
        self.model = model
        y = input.text
        self.cache = cache ?? model.newCache(parameters: nil)
        self.processor = processor
        self.sampler = sampler
        self.maxTokens = maxTokens
        let start = Date()
        try prepare(input, windowSize: prefillStepSize)
        promptPrefillTime = Date().timeIntervalSince(start)
    }

    private mutating func prepare(_ input: LMInput, windowSize: Int) throws {
        processor?.prompt(input.text.tokens)
        switch try model.prepare(input, cache: cache, windowSize: windowSize) {
        case .tokens(let rest): y = LMInput.Text(tokens: step(rest))
        case .logits(let output): y = LMInput.Text(tokens: token(output.logits))
        }
        asyncEval(y.tokens)
    }

    private mutating func token(_ logits: MLXArray) -> MLXArray {
        let last = logits[0..., -1, 0...]
        let token = sampler.sample(logits: processor?.process(logits: last) ?? last)
        processor?.didSample(token: token)
        return token
    }

    private mutating func step(_ previous: LMInput.Text) -> MLXArray {
        let output = withPreparedCache(cache, lengths: previous.sequenceLengths) {
            model(previous[text: .newAxis], cache: cache.isEmpty ? nil : cache, state: state)
        }
        state = output.state
        return token(output.logits)
    }

    public mutating func next() -> Int? {
        if let maxTokens, tokenCount >= maxTokens { return nil }
        let previous = y
        y = LMInput.Text(tokens: step(previous))
        asyncEval(y.tokens)
        tokenCount += 1
        return previous.tokens.item(Int.self)
    }
}
