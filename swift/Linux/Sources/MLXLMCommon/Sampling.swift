import MLX
import MLXNN

/// Chooses tokens `[B]` by logits `[B, V]`.
public protocol LogitSampler {
    func sample(logits: MLXArray) -> MLXArray
}

/// Changes logits by what was said.
public protocol LogitProcessor {
    mutating func prompt(_ prompt: MLXArray)
    func process(logits: MLXArray) -> MLXArray
    mutating func didSample(token: MLXArray)
}

public struct ArgMaxSampler: LogitSampler {
    public init() {}
    public func sample(logits: MLXArray) -> MLXArray { argMax(logits, axis: -1) }
}

public struct CategoricalSampler: LogitSampler {
    let temperature: Float
    let randomState: MLXRandom.RandomState

    public init(temperature: Float, seed: UInt64? = nil) {
        self.temperature = temperature
        randomState = seed.map { MLXRandom.RandomState(seed: $0) } ?? MLXRandom.RandomState()
    }

    public func sample(logits: MLXArray) -> MLXArray {
        MLXRandom.categorical(logits * (1 / temperature), key: randomState)
    }
}

/// Among the most likely tokens whose probabilities reach `topP`.
public struct TopPSampler: LogitSampler {
    let topP: Float
    let sampler: CategoricalSampler

    public init(
        temperature: Float, topP: Float = 1, topK: Int = 0, minP: Float = 0, seed: UInt64? = nil
    ) {
        precondition(topK == 0 && minP == 0, "the stand-in knows top-p only")
        self.topP = topP
        sampler = CategoricalSampler(temperature: temperature, seed: seed)
    }

    public func sample(logits: MLXArray) -> MLXArray {
        let logits = logSoftmax(logits.asType(.float32))
        let order = argSort(logits, axis: -1)
        let ascending = takeAlong(logits, order, axis: -1)
        let kept = MLX.where(
            cumsum(exp(ascending), axis: -1) .> 1 - topP, ascending, -Float.infinity)
        return sampler.sample(logits: putAlong(logits, order, values: kept, axis: -1))
    }
}

/// How to generate.
public struct GenerateParameters: Sendable {
    public var prefillStepSize: Int
    public var maxTokens: Int?
    public var maxKVSize: Int?
    public var temperature: Float
    public var topP: Float
    public var seed: UInt64?

    public init(
        maxTokens: Int? = nil, maxKVSize: Int? = nil, temperature: Float = 0.6, topP: Float = 1,
        prefillStepSize: Int = 512, seed: UInt64? = nil
    ) {
        self.maxTokens = maxTokens
        self.maxKVSize = maxKVSize
        self.temperature = temperature
        self.topP = topP
        self.prefillStepSize = prefillStepSize
        self.seed = seed
    }

    public func sampler() -> LogitSampler {
        if temperature == 0 { return ArgMaxSampler() }
        return 0 < topP && topP < 1
            ? TopPSampler(temperature: temperature, topP: topP, seed: seed)
            : CategoricalSampler(temperature: temperature, seed: seed)
    }

    public func processor() -> LogitProcessor? { nil }
}
