import Foundation
import MLX
import MLXLLM
import MLXLMCommon
import MLXNN

/// A model that attends through ``h2oAttention(queries:keys:values:cache:scale:mask:sinks:)`` and so
/// runs every policy.
public protocol H2OModel: LanguageModel, H2OProfiledModel {
    /// Caches without a bound, as a stock model's `newCache` makes them.
    func plainCaches() -> [any KVCache]

    /// The RoPE of its keys, where it is a plain one and all layers have it; nil by default.
    var plainRope: H2ORope? { get }
}

extension H2OModel {
    public var plainRope: H2ORope? { nil }
}

/// H2O-aware model types in the place of mlx-swift-lm's own.
public enum H2OModels {
    /// The model types that ``register(_:for:)`` replaces.
    public static let modelTypes = ["llama", "mistral", "qwen2", "qwen3"]

    /// Have `LLMModelFactory` make H2O-aware models, whose `newCache` gives bounded caches.
    ///
    /// Call it once, before a model is loaded. Weights, configurations, tokenizers, message generators
    /// and tool formats are those of the stock models. A reranker that has the type of one of them
    /// ("qwen3", with mlx-swift-lm's main branch) is an error while that type is registered: leave the
    /// type out, or use ``factory(_:)``.
    ///
    /// - Parameters:
    ///   - configuration: How caches are bounded. A model that cannot follow it goes on with uniform
    ///     budgets (where the profile is another model's) or the fewest tokens that it can work with,
    ///     and the log says so; ask ``H2OConfiguration/caches(for:)-(LanguageModel)`` for an
    ///     error instead.
    ///   - types: Those of ``modelTypes`` to replace.
    public static func register(
        _ configuration: H2OConfiguration = .default, for types: [String] = modelTypes
    ) async {
        for type in types {
            await LLMTypeRegistry.shared.registerModelType(type) { data in
                try H2OTransformer(configurationData: data, h2o: configuration)
            }
        }
    }

    /// A factory of H2O-aware models beside `LLMModelFactory.shared`, which stays as it is:
    /// `try await H2OModels.factory(.default).loadContainer(from: folder, using: tokenizers)`.
    ///
    /// - Parameter configuration: As of ``register(_:for:)``.
    public static func factory(_ configuration: H2OConfiguration = .default) -> LLMModelFactory {
        let create: (Data) throws -> any LanguageModel = { data in
            try H2OTransformer(configurationData: data, h2o: configuration)
        }
        let creators = modelTypes.map { ($0, create) }
        return LLMModelFactory(
            typeRegistry: ModelTypeRegistry(creators: Dictionary(uniqueKeysWithValues: creators)),
            modelRegistry: LLMRegistry.shared)
    }

    /// A model from a folder with `config.json` and safetensors, without a registry.
    ///
    /// - Parameters:
    ///   - folder: Of an unquantized model of one of ``modelTypes``.
    ///   - dtype: Cast the weights to it; nil leaves them.
    ///   - configuration: How caches are bounded.
    /// - Throws: ``H2OError/file(_:)`` for a folder that holds no such model.
    package static func load(
        folder: URL, dtype: DType? = nil, configuration: H2OConfiguration = .default
    ) throws -> any H2OModel {
        do {
            return try read(folder, dtype, configuration)
        } catch let error as H2OError {
            throw error
        } catch {
            throw H2OError.file(
                "\(folder.path) holds no model that can be loaded: \(error.localizedDescription)")
        }
    }

    private static func read(
        _ folder: URL, _ dtype: DType?, _ configuration: H2OConfiguration
    ) throws -> any H2OModel {
        let data = try Data(contentsOf: folder.appendingPathComponent("config.json"))
        let model = try H2OTransformer(configurationData: data, h2o: configuration)
        var weights: [String: MLXArray] = [:]
        let files = try FileManager.default.contentsOfDirectory(
            at: folder, includingPropertiesForKeys: nil)
        for file in files where file.pathExtension == "safetensors" {
            weights.merge(try loadArrays(url: file)) { $1 }
        }
        weights = model.sanitize(weights: weights)
        if let dtype {
            weights = weights.mapValues { $0.dtype.isFloatingPoint ? $0.asType(dtype) : $0 }
        }
        try model.update(
            parameters: ModuleParameters.unflattened(weights), verify: [.noUnusedKeys])
        eval(model)
        return model
    }
}
