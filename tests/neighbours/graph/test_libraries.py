"""The graph in the hands of those it is made for: scikit-learn and umap-learn."""

import warnings

import numpy as np
import pytest

import spalm
from spalm import InputError, knn_graph
from support.arrays import clustered

sklearn = pytest.importorskip("sklearn")
EXECUTION = spalm.Execution(spalm.Hardware("cpu", 1), ram=1 << 30)
VECTORS = clustered(600, 8, 0, centres=5)


@pytest.fixture(scope="module")
def graph():
    return knn_graph(VECTORS, 20, execution=EXECUTION)


@pytest.fixture(autouse=True)
def no_warnings():
    """scikit-learn warns of graphs whose rows are not sorted."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_it_is_what_the_transformer_of_scikit_learn_makes(graph):
    from sklearn.neighbors import KNeighborsTransformer

    expected = KNeighborsTransformer(n_neighbors=20, mode="distance").fit_transform(VECTORS)
    ours = graph.to_csr()
    assert ours.shape == expected.shape
    assert ours.nnz == expected.nnz
    np.testing.assert_array_equal(ours.indptr, expected.indptr)
    np.testing.assert_allclose(ours.data, expected.data, rtol=1e-4, atol=1e-5)
    assert (np.sort(ours.indices.reshape(600, 21)) == np.sort(expected.indices.reshape(600, 21))).mean() > 0.999
    assert (ours.indices.reshape(600, 21)[:, 0] == np.arange(600)).all()


def test_duplicates_keep_their_zeros():
    found = knn_graph(np.repeat(VECTORS[:50], 3, axis=0), 2, execution=EXECUTION).to_csr()
    assert found.nnz == 150 * 3
    assert (found.data == 0).all()


def test_dbscan(graph):
    from sklearn.cluster import DBSCAN

    settings = {"eps": float(np.median(graph.distances[:, 5])), "min_samples": 5}
    expected = DBSCAN(**settings).fit(VECTORS)
    ours = DBSCAN(**settings, metric="precomputed").fit(graph.to_csr())
    # With 20 neighbours of each, dense places have more within eps than the graph holds; core samples are the same.
    np.testing.assert_array_equal(ours.core_sample_indices_, expected.core_sample_indices_)
    assert (ours.labels_ == expected.labels_).mean() > 0.98


def test_nearest_neighbours_and_a_classifier(graph):
    from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

    expected = NearestNeighbors(n_neighbors=10).fit(VECTORS).kneighbors()
    found = NearestNeighbors(n_neighbors=10, metric="precomputed").fit(graph.to_csr()).kneighbors()
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert (found[1] == expected[1]).mean() > 0.999
    labels, queries = VECTORS[:, 0] > 0, clustered(90, 8, 3)
    between = knn_graph(VECTORS, 20, queries=queries, execution=EXECUTION).to_csr()
    classifier = KNeighborsClassifier(7, metric="precomputed").fit(graph.to_csr(), labels)
    plain = KNeighborsClassifier(7).fit(VECTORS, labels)
    np.testing.assert_array_equal(classifier.predict(between), plain.predict(queries))


def test_manifolds_and_outliers(graph):
    from sklearn.manifold import TSNE, Isomap
    from sklearn.neighbors import LocalOutlierFactor

    expected = LocalOutlierFactor(n_neighbors=15).fit(VECTORS).negative_outlier_factor_
    found = LocalOutlierFactor(n_neighbors=15, metric="precomputed").fit(graph.to_csr()).negative_outlier_factor_
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    places = TSNE(perplexity=6, metric="precomputed", init="random", max_iter=250, random_state=1)
    assert places.fit_transform(graph.to_csr()).shape == (600, 2)
    vectors = clustered(300, 8, 1, centres=1)  # in several components there is no distance between them
    ours = knn_graph(vectors, 30, execution=EXECUTION).to_csr()
    expected = Isomap(n_neighbors=30).fit(vectors).dist_matrix_
    np.testing.assert_allclose(Isomap(n_neighbors=30, metric="precomputed").fit(ours).dist_matrix_, expected, rtol=1e-3)


def test_hdbscan():
    from sklearn.cluster import HDBSCAN

    vectors = clustered(150, 3, 2, centres=3)
    matrix = knn_graph(vectors, 100, execution=EXECUTION).to_csr(symmetric=True)  # k so large that it hangs together
    assert abs(matrix - matrix.T).max() == 0
    for row in range(150):
        assert (np.diff(matrix.data[matrix.indptr[row] : matrix.indptr[row + 1]]) >= 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the default of a setting that will change
        expected = HDBSCAN(min_cluster_size=20, min_samples=5).fit(vectors)
        found = HDBSCAN(min_cluster_size=20, min_samples=5, metric="precomputed").fit(matrix)
    assert len(set(expected.labels_)) > 1
    np.testing.assert_array_equal(found.labels_, expected.labels_)


def test_what_has_no_self_is_said(graph):
    queries = knn_graph(VECTORS, 3, queries=VECTORS[:5], execution=EXECUTION)
    assert queries.to_csr().shape == (5, 600)
    assert queries.to_csr().nnz == 15
    assert graph.to_csr(include_self=False).nnz == 600 * 20
    for call in (queries.for_umap, lambda: queries.to_csr(include_self=True), lambda: queries.to_csr(symmetric=True)):
        with pytest.raises(InputError, match="of queries"):
            call()
    products = knn_graph(VECTORS, 3, metric="ip", execution=EXECUTION)
    assert products.to_csr().nnz == 600 * 3
    with pytest.raises(InputError, match="with ip"):
        products.for_umap()


def test_the_form_for_umap(graph):
    indices, distances = graph.for_umap()
    assert indices.shape == distances.shape == (600, 21)
    np.testing.assert_array_equal(indices[:, 0], np.arange(600))
    assert (distances[:, 0] == 0).all()
    np.testing.assert_array_equal(indices[:, 1:], graph.indices)


def agreement(first: np.ndarray, second: np.ndarray) -> float:
    """Returns how alike two clusterings are: 1 if they are the same but for the names of the clusters."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(first, second))


def test_the_package_hdbscan():
    library = pytest.importorskip("hdbscan", reason="pip install hdbscan")
    vectors = clustered(150, 3, 2, centres=3)
    matrix = knn_graph(vectors, 100, execution=EXECUTION).to_csr(symmetric=True)  # so large that it hangs together
    settings = {"min_cluster_size": 20, "min_samples": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions of scikit-learn with other names
        expected = library.HDBSCAN(**settings).fit_predict(vectors)
        found = library.HDBSCAN(**settings, metric="precomputed").fit_predict(matrix)
    assert len(set(expected)) > 1
    assert agreement(found, expected) > 0.95


def trustworthy(vectors: np.ndarray, places: np.ndarray) -> float:
    """Returns how many of the nearest places are those of near vectors: 1 if all are."""
    from sklearn.manifold import trustworthiness

    return float(trustworthiness(vectors[::5], places[::5], n_neighbors=10))


@pytest.mark.slow
def test_umap():
    umap = pytest.importorskip("umap", reason="pip install umap-learn")
    vectors = clustered(5003, 8, 0, centres=5)  # up to 4,096 it does not look at the graph
    graph = knn_graph(vectors, 14, execution=EXECUTION)
    settings = {"n_neighbors": 15, "n_epochs": 40, "random_state": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = umap.UMAP(**settings, precomputed_knn=graph.for_umap()).fit(vectors)
        plain = umap.UMAP(**settings).fit(vectors)
        wrong = graph.for_umap()[0].copy()
        wrong[:, 1:] = np.random.default_rng(0).integers(0, 5003, (5003, 14))
        misled = umap.UMAP(**settings, precomputed_knn=(wrong, graph.for_umap()[1])).fit(vectors)
    assert abs(ours.graph_ - plain.graph_).sum() < 0.1 * plain.graph_.sum()
    assert trustworthy(vectors, ours.embedding_) > trustworthy(vectors, plain.embedding_) - 0.02
    assert trustworthy(vectors, ours.embedding_) > trustworthy(vectors, misled.embedding_) + 0.1
