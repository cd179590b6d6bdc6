import Foundation
import MLX
import MLXNN

public protocol BaseLanguageModel: Module {
    /// The weights of a file as this model names them.
    func sanitize(weights: [String: MLXArray]) -> [String: MLXArray]
    func sanitize(
        weights: [String: MLXArray], metadata: [String: String]
    ) -> [String: MLXArray]
}

extension BaseLanguageModel {
    public func sanitize(weights: [String: MLXArray]) -> [String: MLXArray] { weights }
    public func sanitize(
        weights: [String: MLXArray], metadata: [String: String]
    ) -> [String: MLXArray] { sanitize(weights: weights) }
}

/// A model's input: tokens, and what they speak of.
public struct LMInput {
    public let text: Text
    public let image: ProcessedImage?
    public let video: ProcessedVideo?
    public let audio: ProcessedAudio?

    public struct ProcessedImage {
        public let pixels: MLXArray

        public init(pixels: MLXArray) { self.pixels = pixels }
    }

    public struct ProcessedVideo {
        public let pixels: MLXArray

        public init(pixels: MLXArray) { self.pixels = pixels }
    }

    public struct ProcessedAudio {}

    public struct Text {
        public let tokens: MLXArray
        public let mask: MLXArray?

        public init(tokens: MLXArray, mask: MLXArray? = nil) {
            self.tokens = tokens
            self.mask = mask
        }

        public subscript(
            indices: MLXArrayIndex..., stream stream: StreamOrDevice = .default
        ) -> Text {
            Text(tokens: tokens[indices, stream: stream], mask: mask?[indices, stream: stream])
        }

        public subscript(
            text indices: MLXArrayIndex..., stream stream: StreamOrDevice = .default
        ) -> Text { Text(tokens: tokens[indices, stream: stream], mask: mask) }

        public var sequenceLengths: [Int]? {
            if let mask { return mask.asType(.int32).sum(axis: -1).asArray(Int.self) }
            return tokens.ndim == 2 ? Array(repeating: tokens.dim(1), count: tokens.dim(0)) : nil
        }
    }

    public init(tokens: MLXArray, mask: MLXArray? = nil) {
        self.init(text: Text(tokens: tokens, mask: mask))
    }

    public init(
        text: Text, image: ProcessedImage? = nil, video: ProcessedVideo? = nil,
        audio: ProcessedAudio? = nil
    ) { (self.text, self.image, self.video, self.audio) = (text, image, video, audio) }
}

/// A model's output: logits `[B, L, V]`.
public struct LMOutput {
    public let logits: MLXArray
    public let state: State?

    public struct Key<T>: Identifiable, Sendable {
        public let id: String
        public init(_ id: String) { self.id = id }
    }

    public struct State {
        private var contents: [String: Any] = [:]
        public init() {}

        public subscript<T>(_ key: Key<T>) -> T? {
            get { contents[key.id] as? T }
            set { contents[key.id] = newValue }
        }
    }

    public init(logits: MLXArray, state: State? = nil) {
        self.logits = logits
        self.state = state
    }
}

/// What is left of a prompt after prefill.
public enum PrepareResult {
    case tokens(LMInput.Text)
    case logits(LMOutput)
}

public protocol LanguageModel: BaseLanguageModel {
    func prepare(_ input: LMInput, cache: [KVCache], windowSize: Int?) throws -> PrepareResult
    func callAsFunction(
        _ input: LMInput.Text, cache: [KVCache]?, state: LMOutput.State?
    ) -> LMOutput
    func callAsFunction(_ inputs: MLXArray, cache: [KVCache]?) -> MLXArray
    func newCache(parameters: GenerateParameters?) -> [KVCache]
}

extension LanguageModel {
    public func callAsFunction(
        _ input: LMInput.Text, cache: [KVCache]?, state: LMOutput.State?
    ) -> LMOutput { LMOutput(logits: callAsFunction(input.tokens, cache: cache)) }

    public func callAsFunction(_ inputs: MLXArray, cache: [KVCache]?) -> MLXArray {
        fatalError("callAsFunction(inputs:cache:) not implemented for \(Self.self)")
    }
}

public protocol KVCacheDimensionProvider {
    var kvHeads: [Int] { get }
}

extension LanguageModel where Self: KVCacheDimensionProvider {
    /// One cache for each layer: everything, or a window.
    public func newCache(parameters: GenerateParameters?) -> [KVCache] {
        kvHeads.map { _ in
            if let size = parameters?.maxKVSize { return RotatingKVCache(maxSize: size, keep: 4) }
            return KVCacheSimple()
        }
    }
}

/// What can be adapted; the layers are those of the transformer.
public protocol LoRAModel {
    var loraLayers: [Module] { get }
    var loraDefaultKeys: [String] { get }
}

extension LoRAModel {
    public var loraDefaultKeys: [String] { [] }
}
