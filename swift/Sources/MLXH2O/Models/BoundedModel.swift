import MLX
import MLXLLM
import MLXLMCommon
import MLXNN

/// A model of MLXLLM, unchanged, whose `newCache` gives bounded caches: code that asks for new caches
/// (`ChatSession` after `clear()`, say) gets such as the configuration says.
final class BoundedModel: Module, LLMModel {
    let inner: any LLMModel
    private let h2o: H2OConfiguration
    private let trial: TrialResult

    /// - Throws: ``H2OError``: what the model cannot be bounded by.
    init(_ inner: any LLMModel, _ h2o: H2OConfiguration) throws {
        self.inner = inner
        self.h2o = h2o
        trial = try h2o.trial(of: inner, with: h2o.plainCaches(of: inner))
        super.init()
        // So that what cannot be is told now, and not when a cache is asked for.
        _ = try h2o.caches(for: inner, plain: h2o.plainCaches(of: inner), trial: trial, [])
    }

    var loraLayers: [Module] { inner.loraLayers }

    func callAsFunction(
        _ input: LMInput.Text, cache: [any KVCache]?, state: LMOutput.State?
    ) -> LMOutput { inner(input, cache: cache, state: state) }

    func callAsFunction(_ inputs: MLXArray, cache: [any KVCache]?) -> MLXArray {
        inner(inputs, cache: cache)
    }

    func sanitize(weights: [String: MLXArray]) -> [String: MLXArray] {
        inner.sanitize(weights: weights)
    }

    func messageGenerator(tokenizer: any Tokenizer) -> any MessageGenerator {
        inner.messageGenerator(tokenizer: tokenizer)
    }

    func newCache(parameters: GenerateParameters?) -> [any KVCache] {
        h2o.requestedCaches(
            for: inner, plain: { try h2o.plainCaches(of: inner) }, { trial }, parameters)
    }
}
